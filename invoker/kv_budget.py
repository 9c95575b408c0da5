"""How much of the arena the KV cache of an instance gets."""

from invoker.errors import OutOfDeviceMemory


TYPICAL_TOKENS = 2048  # room planned per concurrent sequence, where the context is longer


def kv_cache_bytes(
    *, page_bytes: int, page_tokens: int, context_length: int, max_concurrency: int, largest_free_bytes: int
) -> int:
    """Room for `max_concurrency` typical sequences, within half of what the arena has left in one piece
    (so that other instances still fit), but at least for one whole context.

    Raises OutOfDeviceMemory, with the numbers, if not even one context fits.
    """
    least = _pages(context_length, page_tokens) * page_bytes
    if least > largest_free_bytes:
        raise OutOfDeviceMemory(
            f"the KV cache of one sequence of {context_length} tokens takes {least} bytes, and the arena "
            f"has {largest_free_bytes} left in one piece: raise --gpu-memory or lower the context length"
        )
    typical = _pages(min(context_length, TYPICAL_TOKENS), page_tokens) * page_bytes
    half = largest_free_bytes // 2 // page_bytes * page_bytes
    return max(least, min(max(1, max_concurrency) * typical, half))


def _pages(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)
