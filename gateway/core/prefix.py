"""The beginning that prompts share, by which calls find an instance that has it cached. Pure."""

from collections.abc import Sequence

import xxhash

PREFIX_TOKENS = 128  # a page of vLLM's KV cache on a CPU, eight on a GPU
PREFIX_BYTES = 512


def prefix_of_tokens(tenant: str, version: int, ids: Sequence[int]) -> int:
    """Return a key of a prompt's beginning, 0 for one too short to be worth it."""
    if len(ids) < PREFIX_TOKENS:
        return 0
    return _key(tenant, version, ",".join(map(str, ids[:PREFIX_TOKENS])).encode())


def prefix_of_text(tenant: str, version: int, text: bytes) -> int:
    """Return a key of a conversation's beginning, as JSON; 0 for one too short to be worth it."""
    return _key(tenant, version, text[:PREFIX_BYTES]) if len(text) >= PREFIX_BYTES else 0


def _key(tenant: str, version: int, start: bytes) -> int:
    # Of a tenant alone: so are the caches.
    return xxhash.xxh3_64_intdigest(b"%b\0%d\0%b" % (tenant.encode(), version, start)) or 1


def rank(prefix: int, instance_id: str) -> int:
    """Return the rank of an instance for a prefix: the highest is preferred (rendezvous hashing)."""
    return xxhash.xxh3_64_intdigest(instance_id.encode(), seed=prefix)
