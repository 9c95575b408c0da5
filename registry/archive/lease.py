"""The right to write the archive: one lease for the cluster, fenced by its epoch in each change."""

from contextlib import AbstractAsyncContextManager

from registry.clock import Clock
from registry.held_lease import HeldLease, hold_lease
from registry.redis.state import RedisState

LEASE = "ledger-archive"
TTL_S = 60.0


def archive_lease(state: RedisState, clock: Clock) -> AbstractAsyncContextManager[HeldLease]:
    """Hold the lease. Raises Conflict where another process holds it."""
    taken = "the ledger's archive is being written: retry when that is done"
    return hold_lease(state, clock, LEASE, ttl_s=TTL_S, taken=taken)
