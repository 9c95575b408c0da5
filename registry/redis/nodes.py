"""Nodes, instances, load reports and the snapshot of the whole state, in Redis."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from registry import keys
from registry.codec import decode, encode
from registry.errors import StaleEpoch
from registry.records.cast import CastRecord, latest_first
from registry.records.change import (
    SCALE_REQUEST_S,
    InstanceChanged,
    LiveChanged,
    LoadReport,
    NodeUp,
    ScaleRequested,
    ScaleTarget,
    Snapshot,
    VersionLoad,
)
from registry.records.function import Function, FunctionVersion
from registry.records.instance import TRANSITIONS, InstanceRecord
from registry.records.live import LiveRecord
from registry.records.node import NodeRecord
from registry.redis.connections import LuaScript
from registry.redis.store import WRITE_WHEN_FULL, RedisStore, change_script, feed_entry, ordered, redis_ttl_ms

T = TypeVar("T", LoadReport, ScaleRequested)

# KEYS epochs; ARGV node
_NEXT_EPOCH = LuaScript(WRITE_WHEN_FULL + "return redis.call('HINCRBY', KEYS[1], ARGV[1], 1)")

# Heartbeat, fenced by the node's latest epoch. A record of another epoch is that of a former process: it is
# published as gone and its instances are dropped. The instances of a new or expired node are published again,
# since watchers dropped them with the node. Returns 2, or 1 if the instances are unknown (expired, or never
# published), or 0 if the writer's epoch is not the latest.
# KEYS feed epochs nodes node instances
# ARGV length id epoch record ttl-ms instances-ttl-s node-up node-gone-without-epoch
_PUT_NODE = change_script("""
if tonumber(ARGV[3]) < tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or '0') then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
local former = redis.call('HGET', KEYS[4], 'epoch')
if former and former ~= ARGV[3] then publish('NodeGone', ARGV[8] .. former .. '}') end
local known = redis.call('HGET', KEYS[5], '') == ARGV[3]
if not known then
  redis.call('DEL', KEYS[5])
  redis.call('HSET', KEYS[5], '', ARGV[3])
end
redis.call('HSET', KEYS[4], 'epoch', ARGV[3], 'record', ARGV[4], 'ttl', ARGV[5])
redis.call('PEXPIRE', KEYS[4], ARGV[5])
redis.call('EXPIRE', KEYS[5], ARGV[6])
redis.call('SADD', KEYS[3], ARGV[2])
publish('NodeUp', ARGV[7])
if former ~= ARGV[3] then
  local owned = redis.call('HGETALL', KEYS[5])
  for i = 1, #owned, 2 do
    if owned[i] ~= '' then publish('InstanceChanged', '{"record":' .. owned[i + 1] .. '}') end
  end
end
return known and 2 or 1
""")

# Remove a node, fenced by its latest epoch.
# KEYS feed epochs nodes node instances; ARGV length id epoch node-gone-without-epoch
_REMOVE_NODE = change_script("""
local known = tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or '0')
if tonumber(ARGV[3]) < known then return 0 end
local there = redis.call('DEL', KEYS[4], KEYS[5])
redis.call('SREM', KEYS[3], ARGV[2])
if there > 0 then publish('NodeGone', ARGV[4] .. ARGV[3] .. '}') end
return 1
""")

# Publish an instance, fenced by its node's latest epoch. The field "" names the epoch that the
# instances belong to: those of a former process are dropped.
# KEYS feed epochs instances; ARGV length node epoch instance-id record is-final ttl-s change
_PUT_INSTANCE = change_script("""
local known = tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or '0')
if tonumber(ARGV[3]) < known then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
if redis.call('HGET', KEYS[3], '') ~= ARGV[3] then
  redis.call('DEL', KEYS[3])
  redis.call('HSET', KEYS[3], '', ARGV[3])
end
if ARGV[6] == '1' then
  redis.call('HDEL', KEYS[3], ARGV[4])
else
  redis.call('HSET', KEYS[3], ARGV[4], ARGV[5])
end
redis.call('EXPIRE', KEYS[3], ARGV[7])
publish('InstanceChanged', ARGV[8])
return 1
""")

# KEYS feed report gateways; ARGV length gateway change ttl-ms
_PUT_LOAD_REPORT = change_script("""
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
redis.call('SADD', KEYS[3], ARGV[2])
publish('LoadReport', ARGV[3])
return 1
""")

# A scale request enters the feed once per token, and is kept for snapshots for a short time.
# KEYS feed scale request scaled; ARGV length function change token-ttl-s request-ttl-ms
_ASK_SCALE = change_script(
    """
if not redis.call('SET', KEYS[2], '1', 'NX', 'EX', ARGV[4]) then return 0 end
redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[5])
redis.call('SADD', KEYS[4], ARGV[2])
publish('ScaleRequested', ARGV[3])
return 1
""",
    when_full=False,
)

# The whole state at one point of the feed. Ids of expired records are removed on the way.
# No time to live is longer than its initial one, even if the clock of Redis was set back since.
# An empty feed gets a first entry of an unknown kind, since a cursor must name an entry.
# KEYS feed functions versions nodes gateways casts lives scaled
# ARGV node-prefix instances-prefix load-prefix cast-prefix live-prefix scale-request-prefix
_SNAPSHOT = LuaScript("""
local function bounded(left, ttl) return math.min(left, tonumber(ttl) or left) end
local function unexpired(ids, prefix)
  local rows = {}
  for _, id in ipairs(redis.call('SMEMBERS', ids)) do
    local row = redis.call('GET', prefix .. id)
    if row then
      rows[#rows + 1] = {row, redis.call('PTTL', prefix .. id)}
    else
      redis.call('SREM', ids, id)
    end
  end
  return rows
end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
local cursor = last[1] and last[1][1] or redis.call('XADD', KEYS[1], '*', 'Start', '')
local nodes, instances = {}, {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  local row = redis.call('HMGET', ARGV[1] .. id, 'record', 'epoch', 'ttl')
  if row[1] then
    nodes[#nodes + 1] = {row[1], bounded(redis.call('PTTL', ARGV[1] .. id), row[3])}
    if redis.call('HGET', ARGV[2] .. id, '') == row[2] then
      local owned = redis.call('HGETALL', ARGV[2] .. id)
      for i = 1, #owned, 2 do
        if owned[i] ~= '' then instances[#instances + 1] = owned[i + 1] end
      end
    end
  else
    redis.call('SREM', KEYS[4], id)
  end
end
local casts = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[6])) do
  casts[#casts + 1] = redis.call('HGET', ARGV[4] .. id, 'record') or nil
end
local lives = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[7])) do
  local row = redis.call('HMGET', ARGV[5] .. id, 'record', 'ttl')
  if row[1] then
    lives[#lives + 1] = {row[1], bounded(redis.call('PTTL', ARGV[5] .. id), row[2])}
  else
    redis.call('SREM', KEYS[7], id)
  end
end
local heads, versions = redis.call('HVALS', KEYS[2]), redis.call('HVALS', KEYS[3])
local reports, requests = unexpired(KEYS[5], ARGV[3]), unexpired(KEYS[8], ARGV[6])
return {cursor, heads, versions, nodes, instances, reports, casts, lives, requests}
""")


class RedisNodes(RedisStore):
    """Nodes, instances, load reports and the snapshot."""

    async def next_node_epoch(self, node: str) -> int:
        return int(await self._redis.script(_NEXT_EPOCH, [keys.EPOCHS], [node]))

    async def put_node(self, record: NodeRecord, ttl_s: float) -> bool:
        done = await self._change(
            _PUT_NODE,
            [keys.EPOCHS, keys.NODES, keys.node(record.id), keys.instances(record.id)],
            record.id,
            record.epoch,
            encode(record),
            redis_ttl_ms(ttl_s),
            keys.INSTANCES_TTL_S,
            encode(NodeUp(record=record, ttl_s=ttl_s)),
            _gone_without_epoch(record.id),
        )
        if not done:
            raise _stale(record.id, record.epoch)
        return int(done) == 2

    async def remove_node(self, node: str, epoch: int) -> None:
        await self._change(
            _REMOVE_NODE,
            [keys.EPOCHS, keys.NODES, keys.node(node), keys.instances(node)],
            node,
            epoch,
            _gone_without_epoch(node),
        )

    async def put_instance(self, record: InstanceRecord, node_epoch: int) -> None:
        done = await self._change(
            _PUT_INSTANCE,
            [keys.EPOCHS, keys.instances(record.node)],
            record.node,
            node_epoch,
            record.instance_id,
            encode(record),
            int(not TRANSITIONS[record.state]),
            keys.INSTANCES_TTL_S,
            encode(InstanceChanged(record=record)),
        )
        if not done:
            raise _stale(record.node, node_epoch)

    async def put_load_report(self, gateway: str, loads: Sequence[VersionLoad], ttl_s: float) -> None:
        _, change = feed_entry(LoadReport(gateway=gateway, loads=tuple(loads), ttl_s=ttl_s))
        await self._change(
            _PUT_LOAD_REPORT, [keys.load_report(gateway), keys.GATEWAYS], gateway, change, redis_ttl_ms(ttl_s)
        )

    async def request_scale(self, target: ScaleTarget, ttl_s: float = SCALE_REQUEST_S) -> None:
        _, change = feed_entry(ScaleRequested(target=target, ttl_s=ttl_s))
        await self._change(
            _ASK_SCALE,
            [keys.scale(target.token), keys.scale_request(target.function), keys.SCALED],
            target.function,
            change,
            keys.SCALE_TOKEN_TTL_S,
            redis_ttl_ms(ttl_s),
        )

    async def snapshot(self) -> Snapshot:
        cursor, heads, versions, nodes, instances, reports, casts, lives, requests = await self._redis.script(
            _SNAPSHOT,
            [
                *(keys.FEED, keys.FUNCTIONS, keys.VERSIONS, keys.NODES),
                *(keys.GATEWAYS, keys.CASTS, keys.LIVES, keys.SCALED),
            ],
            [
                *(keys.NODE_PREFIX, keys.INSTANCES_PREFIX, keys.LOAD_PREFIX),
                *(keys.CAST_PREFIX, keys.LIVE_PREFIX, keys.SCALE_REQUEST_PREFIX),
            ],
        )
        return Snapshot(
            cursor=cursor.decode(),
            functions=ordered((decode(Function, raw, keys.FUNCTIONS) for raw in heads), "name"),
            versions=ordered(
                (decode(FunctionVersion, raw, keys.VERSIONS) for raw in versions), "function", "version"
            ),
            nodes=ordered((_node_up(raw, ttl) for raw, ttl in nodes), "record.id"),
            instances=ordered(
                (decode(InstanceRecord, raw, keys.INSTANCES_PREFIX) for raw in instances), "instance_id"
            ),
            load_reports=ordered(
                (_with_ttl_left(LoadReport, raw, ttl, keys.LOAD_PREFIX) for raw, ttl in reports), "gateway"
            ),
            casts=tuple(latest_first(decode(CastRecord, raw, keys.CAST_PREFIX) for raw in casts)),
            live=ordered((_live(raw, ttl) for raw, ttl in lives), "record.function", "record.version"),
            scale_requests=ordered(
                (
                    _with_ttl_left(ScaleRequested, raw, ttl, keys.SCALE_REQUEST_PREFIX)
                    for raw, ttl in requests
                ),
                "target.function",
            ),
        )


def _node_up(raw: bytes, ttl_ms: int) -> NodeUp:
    return NodeUp(record=decode(NodeRecord, raw, keys.NODE_PREFIX), ttl_s=ttl_ms / 1000)


def _with_ttl_left(kind: type[T], raw: bytes, ttl_ms: int, key: str) -> T:
    """Decode a change, and return it with the part of its time to live that is left."""
    change = decode(kind, raw, key)
    return replace(change, ttl_s=min(ttl_ms / 1000, change.ttl_s))


def _live(raw: bytes, ttl_ms: int) -> LiveChanged:
    return LiveChanged(record=decode(LiveRecord, raw, keys.LIVE_PREFIX), ttl_s=ttl_ms / 1000)


def _gone_without_epoch(node: str) -> bytes:
    """Return the JSON of a NodeGone up to the epoch, which the script appends."""
    return b'{"id":' + encode(node) + b',"epoch":'


def _stale(node: str, epoch: int) -> StaleEpoch:
    return StaleEpoch(f"node {node} has a later epoch than {epoch}")
