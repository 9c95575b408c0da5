"""The base of each part of the state in Redis: the connection pool and the publication of changes."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

from registry import keys
from registry.codec import decode, encode, encode_marked, kind_of
from registry.records.change import Change, FunctionChanged
from registry.records.schema import BASE_SCHEMA
from registry.redis.connections import Argument, ConnectionPool, LuaScript
from registry.state import ClusterConfig

T = TypeVar("T")

# State and feed change in one script, so they are never seen apart. The trim is approximate (whole nodes of
# the stream), which is cheap.
_PUBLISH = """
local function publish(kind, body)
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', kind, body)
end
"""

# Replace the configuration unless another gateway did. KEYS cluster; ARGV before after
_RAISE_SCHEMA = LuaScript("""
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2]) end
return 1
""")

# A full Redis refuses a script at its first write, unless that is a deletion. State of bounded size is
# written even then: otherwise nodes and the controller would lose their leases, and running calls with them.
WRITE_WHEN_FULL = f"redis.call('DEL', '{keys.PROBE}')\n"


def change_script(source: str, *, when_full: bool = True) -> LuaScript:
    """Return a script for `RedisStore._change`: `publish(kind, body)` appends to the feed KEYS[1]."""
    return LuaScript((WRITE_WHEN_FULL if when_full else "") + _PUBLISH + source)


class RedisStore:
    """A part of the state; all parts share one connection pool."""

    def __init__(self, connections: ConnectionPool, *, feed_length: int = keys.FEED_LENGTH) -> None:
        self._redis = connections
        self._feed_length = feed_length

    async def _change(self, script: LuaScript, keys_: Sequence[str], *args: Argument) -> Any:
        """Return the reply of a change_script; the feed precedes `keys_`, and its length `args`."""
        return await self._redis.script(script, [keys.FEED, *keys_], [self._feed_length, *args])

    async def _raise_schema(self, schema: int) -> None:
        """Raise the cluster's schema to that of a record before it is written."""
        while schema > BASE_SCHEMA and (raw := await self._redis.call("GET", keys.CLUSTER)) is not None:
            config = decode(ClusterConfig, raw, keys.CLUSTER)
            if config.schema >= schema:
                return
            raised = encode(replace(config, schema=schema))
            await self._redis.script(_RAISE_SCHEMA, [keys.CLUSTER], [raw, raised])


def feed_entry(change: Change) -> tuple[str, bytes]:
    """Return field and value of the change's entry in the feed."""
    schema = change.schema if isinstance(change, FunctionChanged) else BASE_SCHEMA
    return kind_of(change), encode_marked(change, schema)


def redis_ttl_ms(ttl_s: float) -> int:
    """Return a time to live in milliseconds, at least 1, since Redis refuses 0."""
    return max(1, round(ttl_s * 1000))


def ordered(records: Iterable[T], *by: str) -> tuple[T, ...]:
    """Return the records sorted by these attributes."""
    return tuple(sorted(records, key=attrgetter(*by)))
