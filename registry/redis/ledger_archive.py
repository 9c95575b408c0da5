"""The archive's index in Redis, and the removal of archived rows; all changes are fenced by an epoch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from registry import keys
from registry.accounting.row_order import LedgerKind, Row, position_of
from registry.codec import decode, encode
from registry.errors import Conflict, StaleEpoch
from registry.records.archive import ArchiveFile, ArchiveIndex
from registry.records.usage import RequestRecord
from registry.redis.connections import Argument, LuaScript
from registry.redis.ledger_rows import ROW_KEYS, RedisLedgerRows
from registry.redis.store import WRITE_WHEN_FULL

# Refuse writers with an older epoch than ARGV[1]; the archive frees memory, so a full Redis takes its writes.
# KEYS state …; ARGV epoch …
_FENCED = (
    WRITE_WHEN_FULL
    + """
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if tonumber(ARGV[1]) < epoch then return -1 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
"""
)

# Raise the time before which requests are closed, never past Redis' own clock: a clock that is ahead on one
# machine would otherwise refuse records for as long. ARGV epoch closed
_CLOSE = LuaScript(
    _FENCED
    + """
if tonumber(ARGV[2]) > tonumber(redis.call('TIME')[1]) then return 0 end
local closed = redis.call('HGET', KEYS[1], 'closed')
if not closed or tonumber(closed) < tonumber(ARGV[2]) then
  redis.call('HSET', KEYS[1], 'closed', ARGV[2])
end
return 1
"""
)

# Add a file to the index, in place of another, and to sums. A repetition changes nothing but the serial. The
# serial has the time in it, so that it never repeats after a restore.
# KEYS state index; ARGV epoch digest file replaced-digest (key field amount)*
_PUBLISH = LuaScript(
    _FENCED
    + """
if redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3]) == 1 then
  for i = 5, #ARGV, 3 do redis.call('HINCRBY', ARGV[i], ARGV[i + 1], ARGV[i + 2]) end
end
if ARGV[4] ~= '' then redis.call('HDEL', KEYS[2], ARGV[4]) end
local now = redis.call('TIME')
local serial = math.max(tonumber(redis.call('HGET', KEYS[1], 'serial') or '0') + 1, now[1] * 1000000 + now[2])
redis.call('HSET', KEYS[1], 'serial', string.format('%.0f', serial))
return 1
"""
)

# Remove rows of a file that the index has; it lacks one that was published before a failover or a restore.
# KEYS state archive records index*; ARGV epoch digest, and a msgpack array of members for records and indexes
_REMOVE = LuaScript(
    _FENCED
    + """
if redis.call('HEXISTS', KEYS[2], ARGV[2]) == 0 then return -1 end
for i = 3, #KEYS do
  local members = cmsgpack.unpack(ARGV[i])
  if #members > 0 then redis.call(i == 3 and 'HDEL' or 'ZREM', KEYS[i], unpack(members)) end
end
return 1
"""
)

# Replace records that are still what was read. KEYS state records client-index;
# ARGV epoch (id before after client-member)*
_REPLACE = LuaScript(
    _FENCED
    + """
local done = 0
for i = 2, #ARGV, 4 do
  if redis.call('HGET', KEYS[2], ARGV[i]) == ARGV[i + 1] then
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 2])
    if ARGV[i + 3] ~= '' then redis.call('ZREM', KEYS[3], ARGV[i + 3]) end
    done = done + 1
  end
end
return done
"""
)

# Move the amounts of fields to others. KEYS state sums; ARGV epoch (field instead)*
_RENAME_SUMS = LuaScript(
    _FENCED
    + """
for i = 2, #ARGV, 2 do
  local amount = redis.call('HGET', KEYS[2], ARGV[i])
  if amount then
    redis.call('HINCRBY', KEYS[2], ARGV[i + 1], amount)
    redis.call('HDEL', KEYS[2], ARGV[i])
  end
end
return 1
"""
)

# KEYS state index; ARGV known-serial. Returns no files if the index has not changed since.
_INDEX = LuaScript("""
local state = redis.call('HMGET', KEYS[1], 'serial', 'closed')
local serial = state[1] or '0'
return {serial, state[2] or '-inf', serial == ARGV[1] and {} or redis.call('HVALS', KEYS[2])}
""")

_pack = msgspec.msgpack.Encoder().encode
SumChange = tuple[str, str | bytes, int]


@dataclass(frozen=True, slots=True)
class RowNames:
    """The members of a row: in the records and the indexes, and of a request in that by client id."""

    member: str
    client_member: str = ""


class RedisLedgerArchive(RedisLedgerRows):
    """The index of the archive."""

    async def archive_index(self, known: ArchiveIndex | None = None) -> ArchiveIndex:
        """Return the index; `known` itself if that is current."""
        known_serial = "" if known is None else str(known.serial)
        serial, closed, raws = await self._redis.script(
            _INDEX, [keys.ARCHIVE_STATE, keys.ARCHIVE], [known_serial]
        )
        if known is not None and int(serial) == known.serial:
            return known if float(closed) == known.closed else replace(known, closed=float(closed))
        files = [decode(ArchiveFile, raw, keys.ARCHIVE) for raw in raws]
        in_order = sorted(files, key=lambda file: (file.day, file.first_at, file.digest))
        return ArchiveIndex(serial=int(serial), closed=float(closed), files=tuple(in_order))

    async def close_requests(self, epoch: int, before: float) -> None:
        """Close the requests that ended before: `add_request` and `void_request` then refuse them.

        Raises Conflict for a time that is in the future by the clock of Redis.
        """
        if not await self._fenced(_CLOSE, [keys.ARCHIVE_STATE], epoch, repr(float(before))):
            raise Conflict("this machine's clock is ahead of that of Redis: no day is archived")

    async def publish_file(
        self, epoch: int, file: ArchiveFile, *, replaces: str = "", sums: Iterable[SumChange] = ()
    ) -> None:
        """Add a file to the index, and atomically drop the one that it replaces and change sums."""
        changes = [part for change in sums for part in change]
        await self._fenced(
            _PUBLISH,
            [keys.ARCHIVE_STATE, keys.ARCHIVE],
            epoch,
            *(file.digest, encode(file), replaces, *changes),
            replicated=True,
        )

    async def remove_rows(
        self, epoch: int, kind: LedgerKind, rows: Sequence[RowNames], *, digest: str
    ) -> None:
        """Remove a page of rows of a published file. Raises StaleEpoch if the index lacks that."""
        where = ROW_KEYS[kind]
        members = _pack([row.member for row in rows])
        key_names = [keys.ARCHIVE_STATE, keys.ARCHIVE, where.records, *where.indexes]
        lists = [members] * (len(key_names) - 2)
        if kind is LedgerKind.REQUESTS:
            key_names.append(keys.REQUESTS_BY_CLIENT_ID)
            lists.append(_pack([row.client_member for row in rows if row.client_member]))
        await self._fenced(_REMOVE, key_names, epoch, digest, *lists)

    async def replace_requests(
        self, epoch: int, changes: Sequence[tuple[RequestRecord, RequestRecord]]
    ) -> int:
        """Replace records that are still as they were, and drop their client ids; return how many were."""
        parts: list[Argument] = []
        for before, after in changes:
            parts += (before.request_id, encode(before), encode(after), client_member(before))
        key_names = [keys.ARCHIVE_STATE, keys.REQUESTS, keys.REQUESTS_BY_CLIENT_ID]
        return await self._fenced(_REPLACE, key_names, epoch, *parts)

    async def rename_tenant_sums(self, epoch: int, tenant: str, alias: str) -> None:
        """Turn the sums of a tenant into those of its alias."""
        for day in await self._redis.call("SMEMBERS", keys.USAGE_DAYS):
            renames: list[Argument] = []
            for field in await self._redis.call("HKEYS", keys.usage(int(day))):
                function, owner, column = decode(tuple[str, str, str], field, keys.usage(int(day)))
                if owner == tenant:
                    renames += (field, encode((function, alias, column)))
            if renames:
                await self._fenced(_RENAME_SUMS, [keys.ARCHIVE_STATE, keys.usage(int(day))], epoch, *renames)

    async def tenant_alias(self, tenant: str, fresh: str) -> str:
        """Return the alias of a tenant that is being deleted: at first the `fresh` one."""
        _, alias = await self._redis.run(
            ("HSETNX", keys.ARCHIVE_STATE, f"alias {tenant}", fresh),
            ("HGET", keys.ARCHIVE_STATE, f"alias {tenant}"),
        )
        return str(alias.decode())

    async def forget_alias(self, tenant: str) -> None:
        """Forget the alias of a deleted tenant."""
        await self._redis.call("HDEL", keys.ARCHIVE_STATE, f"alias {tenant}")

    async def _fenced(
        self,
        script: LuaScript,
        key_names: Sequence[str],
        epoch: int,
        *args: Argument,
        replicated: bool = False,
    ) -> int:
        reply = int(await self._redis.script(script, key_names, [epoch, *args], replicated=replicated))
        if reply < 0:
            raise StaleEpoch("another process writes the archive now")
        return reply


def names_of(row: Row) -> RowNames:
    """Return the members of a row."""
    return RowNames(position_of(row).member, client_member(row) if isinstance(row, RequestRecord) else "")


def client_member(record: RequestRecord) -> str:
    """Return the record's member of the index by client request id, "" if it has none."""
    if not record.client_request_id:
        return ""
    return keys.client_request(record.client_request_id, record.ended_at, record.request_id)
