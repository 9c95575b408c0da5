"""What each part of the state in Redis stands on: the connections and how a change gets published."""

from registry import keys
from registry.change import Change
from registry.codec import encode, kind_of
from registry.redis_connections import Connections

# The first lines of each script that changes the state: KEYS[1] is the feed, ARGV[1] its length.
# State and feed change in one script, so that nobody sees the one without the other. The trim is
# approximate (whole nodes of the stream), which costs next to nothing.
PUBLISH = """
local function publish(kind, body)
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', kind, body)
end
"""


class RedisStore:
    """A part of the state; all parts of one state share `connections`."""

    def __init__(self, connections: Connections, *, feed_length: int = keys.FEED_LENGTH) -> None:
        self._redis = connections
        self._feed_length = feed_length


def published(change: Change) -> tuple[str, bytes]:
    """The field and the value of a change's entry in the feed."""
    return kind_of(change), encode(change)


def milliseconds(ttl_s: float) -> int:
    """A time to live for Redis, which refuses 0."""
    return max(1, round(ttl_s * 1000))
