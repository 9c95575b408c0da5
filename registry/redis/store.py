"""The base of each part of the state in Redis: the connection pool and the publication of changes."""

from registry import keys
from registry.codec import encode, kind_of
from registry.records.change import Change
from registry.redis.connections import ConnectionPool

# The first lines of each script that changes the state: KEYS[1] is the feed, ARGV[1] its length.
# State and feed change in one script, so they are never seen apart. The trim is approximate (whole nodes of
# the stream), which is cheap.
PUBLISH = """
local function publish(kind, body)
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', kind, body)
end
"""


class RedisStore:
    """A part of the state; all parts share one connection pool."""

    def __init__(self, connections: ConnectionPool, *, feed_length: int = keys.FEED_LENGTH) -> None:
        self._redis = connections
        self._feed_length = feed_length


def feed_entry(change: Change) -> tuple[str, bytes]:
    """Return field and value of the change's entry in the feed."""
    return kind_of(change), encode(change)


def redis_ttl_ms(ttl_s: float) -> int:
    """Return a time to live in milliseconds, at least 1, since Redis refuses 0."""
    return max(1, round(ttl_s * 1000))
