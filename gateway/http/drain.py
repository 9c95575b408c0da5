"""The bound on requests in flight, and the drain on SIGTERM until they have ended."""

import asyncio
from enum import StrEnum

from gateway.core.errors import ApiError

# A tenant may hold this many times the slots that are free: 4 of 5 by itself, 4 of 9 beside another that
# holds as many, so that there is always a slot for others.
_SHARE_OF_FREE = 4


class ServingPhase(StrEnum):
    """The life of a gateway."""

    SERVING = "serving"  # accepts requests
    DRAINING = "draining"  # finishes requests in flight, refuses new ones


class GatewayDraining(ApiError):
    """The refusal of a new request, or of one that outlasts the grace time (503)."""

    def __init__(self) -> None:
        headers = (("connection", "close"),)
        message = "this gateway is shutting down: retry"
        super().__init__(503, "draining", message, retry_after_s=1, headers=headers)


class InFlightLimiter:
    """A count of the requests in flight, with a limit in all and for each tenant.

    A request whose body has not arrived holds a slot but is not in flight: a drain does not wait for it.
    The bodies of all requests have a limit in bytes, too.
    """

    def __init__(self, max_in_flight: int, body_bytes: int = 512 << 20) -> None:
        self.phase = ServingPhase.SERVING
        self.in_flight = 0
        self.arriving = 0
        self._max_in_flight = max_in_flight
        self._tenants: dict[str, int] = {}
        self.body_bytes = 0  # of all bodies that are charged
        self._max_body_bytes = body_bytes
        self._tenant_bytes: dict[str, int] = {}
        self._idle = asyncio.Event()  # set when nothing is in flight, cleared by `wait_idle`

    def __repr__(self) -> str:
        return f"<Gate {self.phase} in_flight={self.in_flight} arriving={self.arriving}>"

    def begin_body(self) -> None:
        """Take a slot for a request whose body is still to arrive. Raises ApiError (503)."""
        self._check()
        self.arriving += 1

    def abandon_body(self) -> None:
        """Free the slot of a request whose body did not arrive."""
        self.arriving -= 1

    def admit(self) -> None:
        """Count a request whose body has arrived as in flight. Raises GatewayDraining."""
        if self.phase is ServingPhase.DRAINING:
            raise GatewayDraining
        self.arriving -= 1
        self.in_flight += 1

    def acquire(self) -> None:
        """Take a slot for a request that is in flight at once. Raises ApiError (503)."""
        self._check()
        self.in_flight += 1

    def _check(self) -> None:
        if self.phase is ServingPhase.DRAINING:
            raise GatewayDraining
        if (taken := self.in_flight + self.arriving) >= self._max_in_flight:
            message = f"this gateway has {taken} requests in flight, its limit: retry"
            raise ApiError(503, "overloaded", message, retry_after_s=1)

    def charge(self, tenant: str) -> str:
        """Charge a slot that was taken to its tenant, which is returned.

        Raises ApiError (503) if the tenant holds too many, given how few are free for others.
        """
        free = self._max_in_flight - self.in_flight - self.arriving
        own = self._tenants.get(tenant, 0)
        if own > _SHARE_OF_FREE * free:
            message = f"this tenant has {own} requests in flight, its share of this gateway: retry"
            raise ApiError(503, "overloaded", message, retry_after_s=1)
        self._tenants[tenant] = own + 1
        return tenant

    def refund(self, tenant: str) -> None:
        """Take a charged slot off its tenant's account."""
        if (own := self._tenants.pop(tenant)) > 1:
            self._tenants[tenant] = own - 1

    def charge_body(self, tenant: str, nbytes: int) -> None:
        """Charge memory for a part of a body.

        Raises ApiError (503) if all bodies, or those of the tenant, hold too much.
        """
        own = self._tenant_bytes.get(tenant, 0) + nbytes
        free = self._max_body_bytes - self.body_bytes - nbytes
        if own > _SHARE_OF_FREE * free:
            message = "this gateway holds too much of request bodies, in all or of this tenant: retry"
            raise ApiError(503, "overloaded", message, retry_after_s=1)
        self._tenant_bytes[tenant] = own
        self.body_bytes += nbytes

    def refund_body(self, tenant: str, nbytes: int) -> None:
        """Return the memory of a body."""
        self.body_bytes -= nbytes
        if (own := self._tenant_bytes.pop(tenant) - nbytes) > 0:
            self._tenant_bytes[tenant] = own

    def release(self) -> None:
        """Free the slot of a request in flight."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    def drain(self) -> None:
        """Accept no further request."""
        self.phase = ServingPhase.DRAINING

    async def wait_idle(self, limit_s: float) -> bool:
        """Wait at most `limit_s` until nothing is in flight; return whether that is so."""
        if not self.in_flight:
            return True
        self._idle.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
