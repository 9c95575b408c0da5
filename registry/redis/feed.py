"""The change feed in Redis: one stream, followed on a connection of one's own."""

from collections.abc import AsyncIterator

from redis.exceptions import ResponseError

from registry import keys
from registry.change import Change
from registry.codec import decode_change
from registry.errors import NotFound, StateUnavailable
from registry.redis_store import RedisStore

# A read of the feed waits in Redis for this long, then asks again: that is no polling for changes
# (they come at once), but how a watcher notices that its Redis is gone without a word.
BLOCK_S = 2.0
# Changes taken from Redis at once.
BATCH = 256


class RedisFeed(RedisStore):
    async def watch(self, cursor: str) -> AsyncIterator[tuple[str, Change]]:
        async with self._redis.dedicated() as exchange:
            while True:
                # A cursor is the id of the last entry seen. While that entry is still there nothing
                # after it has been trimmed, and the feed is the one that it was taken from: ids hold
                # the time, so a Redis that lost its last second does not give the same id again.
                kept, read = await exchange.run(
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
                    raise NotFound(f"the feed no longer reaches back to {cursor}")
                for entry_id, (kind, body) in read[0][1] if read else ():
                    cursor = entry_id.decode()
                    change = decode_change(kind, body, f"{keys.FEED}[{cursor}]")
                    if change is not None:
                        yield cursor, change
