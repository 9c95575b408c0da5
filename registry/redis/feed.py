"""The change feed in Redis: one stream, read on a dedicated connection."""

from collections.abc import AsyncIterator

from redis.exceptions import ResponseError

from registry import keys
from registry.codec import decode_change
from registry.errors import NotFound, StateUnavailable
from registry.records.change import Change
from registry.redis.store import RedisStore

# A read of the feed blocks in Redis for this long and is then repeated. Changes arrive at once; the
# repetition is how a watcher detects a lost Redis.
BLOCK_S = 2.0
# Changes read by one command.
BATCH = 256


class RedisFeed(RedisStore):
    """The change feed as a Redis stream."""

    async def watch(self, cursor: str) -> AsyncIterator[tuple[str, Change]]:
        async with self._redis.dedicated() as connection:
            while True:
                # A cursor is the id of the last entry read. While that entry exists nothing after it has
                # been trimmed, and the feed is the same one: ids contain the time, so a Redis that lost
                # its last second does not assign the same id again.
                kept, read = await connection.run(
                    ("XRANGE", keys.FEED, cursor, cursor, "COUNT", 1),
                    ("XREAD", "COUNT", BATCH, "BLOCK", int(BLOCK_S * 1000), "STREAMS", keys.FEED, cursor),
                    blocking_s=BLOCK_S,
                )
                for reply in (kept, read):
                    if isinstance(reply, ResponseError) and "stream ID" in str(reply):
                        raise NotFound(f"the feed has no cursor {cursor!r}")
                    if isinstance(reply, ResponseError):
                        raise StateUnavailable(f"Redis refused: {reply}") from reply
                if not kept:
                    raise NotFound(f"the feed has been trimmed beyond cursor {cursor}")
                for entry_id, (kind, body) in read[0][1] if read else ():
                    cursor = entry_id.decode()
                    change = decode_change(kind, body, f"{keys.FEED}[{cursor}]")
                    if change is not None:
                        yield cursor, change
