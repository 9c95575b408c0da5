"""The transport seam: how one node reads another node's memory."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rdmacast.plan_slot import PlanSlot

OnStart = Callable[[], None]
Check = Callable[[int, memoryview], Sequence[int]]  # bytes at an offset of a region; returns damaged units


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """The address of a region server (`tcp://host:port`) and the (virtual) host that it runs on."""

    url: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportChoice:
    """The transport that serves a pair of nodes, and the reason."""

    transport: str
    reason: str


class Link(Protocol):
    """A connection to one peer.

    Several `read_into` calls may be pending at once; each completes by itself. A link that raised
    LinkClosed stays closed.
    """

    @property
    def transport(self) -> str: ...

    @property
    def received_bytes(self) -> int:
        """The bytes of regions received so far, those of pending reads included."""
        ...

    @property
    def is_reusable(self) -> bool:
        """Whether it may be kept for another cast: it is open, has no read, and holds nothing of a region."""
        ...

    async def read_into(
        self, region: str, offset: int, into: memoryview, on_start: OnStart | None = None
    ) -> None:
        """Fill `into` from `[offset, offset + len(into))` of the peer's region.

        Waits while the peer has not published those bytes yet; `on_start` is called once the peer sends
        them (more often if this takes several requests). The buffer belongs to the link until this returns
        or raises; after cancellation too, nothing is written into it once the call has ended. Raises
        RegionGone, LinkClosed, ProtocolError.
        """
        ...

    async def aclose(self) -> None:
        """Close; pending reads raise LinkClosed. Idempotent."""
        ...


@runtime_checkable
class CheckingLink(Protocol):
    """A Link whose reads are copies by this host's processor."""

    async def read_checked(
        self,
        region: str,
        offset: int,
        into: memoryview,
        check: Check,
        piece_bytes: int,
        on_start: OnStart | None = None,
    ) -> Sequence[int]:
        """Read as `read_into` does, and check each piece in a thread while it is in the processor's cache.

        Returns the damaged units of all pieces. Raises what `check` raises, too.
        """
        ...


@runtime_checkable
class SlottedLink(Protocol):
    """A Link whose peer serves payloads in the slots of a plan: several readers share its port."""

    async def read_in_slot(
        self, region: str, offset: int, into: memoryview, slot: PlanSlot, on_start: OnStart | None = None
    ) -> None:
        """Read as `read_into` does, in the slot: earlier slots are served first unless they are skipped."""
        ...


class Transport(Protocol):
    """A factory of links of one kind."""

    @property
    def name(self) -> str: ...

    def connect(self, peer: PeerAddress) -> AbstractAsyncContextManager[Link]:
        """Open an authenticated link. Raises AuthError, LinkClosed, ProtocolError."""
        ...


class RegionSource(Protocol):
    """What a region server serves: bytes that may still be arriving."""

    @property
    def nbytes(self) -> int: ...

    @property
    def shm_path(self) -> str | None:
        """The file behind the region, for readers on the same host; None if there is none."""
        ...

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a read-only view; only bytes that `wait_for` has promised may be read."""
        ...

    async def wait_for(self, offset: int, nbytes: int) -> None:
        """Return once the range is present and checked. Raises RegionGone if it never will be."""
        ...
