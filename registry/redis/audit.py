"""The audit log in Redis: a stream of what was attempted, and a hash with the outcome of each.

Entries are only added; the oldest are removed beyond `AUDIT_LENGTH`. An entry is written once, whatever is
repeated: its id is in the hash from then on.
"""

from registry import keys
from registry.codec import decode, encode
from registry.errors import InvalidRecord
from registry.records.audit import (
    CHANGES,
    AuditEntry,
    AuditLogName,
    AuditOutcome,
    AuditPage,
    AuditQuery,
    AuditRecord,
)
from registry.redis.connections import LuaScript
from registry.redis.store import WRITE_WHEN_FULL, RedisStore

# Add an entry unless it is there, and remove the oldest. Its size is bounded, so a full Redis takes it, too:
# what frees memory is a change itself. KEYS log outcomes; ARGV length id entry
_ADD = LuaScript(
    WRITE_WHEN_FULL
    + """
if redis.call('HSETNX', KEYS[2], ARGV[2], '') == 0 then return 0 end
redis.call('XADD', KEYS[1], '*', 'id', ARGV[2], 'entry', ARGV[3])
local over = redis.call('XLEN', KEYS[1]) - tonumber(ARGV[1])
if over > 0 then
  for _, old in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', math.min(over, 1000))) do
    redis.call('XDEL', KEYS[1], old[1])
    redis.call('HDEL', KEYS[2], old[2][2])
  end
end
return 1
"""
)

# Set the outcome of an entry that has none. KEYS outcomes; ARGV id outcome
_END = LuaScript(
    WRITE_WHEN_FULL
    + """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= '' then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""
)


class RedisAudit(RedisStore):
    """The audit log as streams."""

    async def add_audit_entry(
        self, entry: AuditEntry, *, log: AuditLogName = AuditLogName.CHANGES, length: int = keys.AUDIT_LENGTH
    ) -> None:
        await self._redis.script(
            _ADD,
            [keys.audit(log), keys.audit_outcomes(log)],
            [length, entry.id, encode(entry)],
            replicated=True,
        )

    async def end_audit_entry(
        self, entry_id: str, outcome: AuditOutcome, *, log: AuditLogName = AuditLogName.CHANGES
    ) -> None:
        await self._redis.script(
            _END, [keys.audit_outcomes(log)], [entry_id, encode(outcome)], replicated=True
        )

    async def audit_page(self, query: AuditQuery = CHANGES) -> AuditPage:
        log = query.log
        first = "-" if query.since is None else str(round(query.since * 1000))
        last = "+" if query.until is None else str(max(0, round(query.until * 1000) - 1))
        if query.cursor:
            last = _before(query.cursor)
        found = await self._redis.call("XREVRANGE", keys.audit(log), last, first, "COUNT", query.limit)
        if not found:
            return AuditPage(records=())
        outcomes = await self._redis.call("HMGET", keys.audit_outcomes(log), *(body[1] for _, body in found))
        records = [
            AuditRecord(
                entry=decode(AuditEntry, body[3], keys.audit(log)),
                outcome=decode(AuditOutcome, raw, keys.audit_outcomes(log)) if raw else None,
            )
            for (_, body), raw in zip(found, outcomes, strict=True)
        ]
        return AuditPage(records=records, cursor=found[-1][0].decode() if len(found) == query.limit else "")


def _before(cursor: str) -> str:
    """Return the greatest id below that of an entry. Raises InvalidRecord unless it is one."""
    parts = cursor.split("-")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise InvalidRecord(f"unknown cursor {cursor!r}")
    moment, serial = map(int, parts)
    return f"{moment}-{serial - 1}" if serial else str(max(0, moment - 1))
