"""How much of the arena the KV cache of an instance gets."""

TYPICAL_TOKENS = 2048  # room planned per concurrent sequence, where the context is longer


def kv_cache_bytes(*, least_bytes: int, wanted_bytes: int, largest_free_bytes: int) -> int:
    """What is wanted, within half of what the arena has left in one piece (so that other instances still
    fit), but at least what one whole context takes: without that the instance would be of no use."""
    return max(least_bytes, min(wanted_bytes, largest_free_bytes // 2))
