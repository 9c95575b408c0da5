"""Time limits of a node's part in a cast (pure)."""

from rdmacast.cast.session_settings import SessionSettings

# A peer may wait for its own source and that one, by the plans, for us: neither would ever end.
STALL_S = 30.0  # besides the time that blocks may take
MIN_BYTES_PER_S = 256 << 10  # slower sources and casts are dropped


def window_s(block_bytes: int) -> float:
    """Return the seconds that a window of blocks may take."""
    return SessionSettings().window * block_bytes / MIN_BYTES_PER_S


def silence_s(block_bytes: int) -> float:
    """Return the longest time without a new block."""
    return STALL_S + window_s(block_bytes)
