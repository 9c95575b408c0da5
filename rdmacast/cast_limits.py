"""How long a node's part in a cast may be without news before it is given up (pure)."""

from rdmacast.session_settings import SessionSettings

# A peer may wait for its own source, and that one, as the plans were made, for us: neither would ever end.
STALL_S = 30.0  # besides the time that blocks may take
LEAST_BYTES_S = 256 << 10  # a source that gives less is given up, and so is a cast that brings less


def pulls_s(block_bytes: int) -> float:
    """What a window of blocks may take."""
    return SessionSettings().window * block_bytes / LEAST_BYTES_S


def silence_s(block_bytes: int) -> float:
    """The longest that no block may come for."""
    return STALL_S + pulls_s(block_bytes)
