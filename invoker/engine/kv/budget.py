"""The share of the arena that the KV cache of an instance gets."""

TYPICAL_TOKENS = 2048  # planned per concurrent sequence, where the context is longer


def kv_cache_bytes(*, min_bytes: int, wanted_bytes: int, room_bytes: int, largest_room_bytes: int) -> int:
    """Return the wanted size, at most half of the room and its largest range, at least one whole context.

    The half that is left is for other instances; with less than one context the instance would be useless.
    """
    return max(min_bytes, min(wanted_bytes, room_bytes // 2, largest_room_bytes))
