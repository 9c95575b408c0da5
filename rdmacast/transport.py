"""The transport seam: how one node reads another node's memory."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rdmacast.due import Due

Began = Callable[[], None]
Check = Callable[[int, memoryview], Sequence[int]]  # bytes at an offset of a region; returns damaged units


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Where a region server listens (`tcp://host:port`) and on which (virtual) host it runs."""

    url: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which transport serves a pair of nodes, and why."""

    transport: str
    reason: str


class Link(Protocol):
    """A connection to one peer.

    Several `read_into` calls may be under way at once; each completes by itself. A link that raised
    LinkClosed stays closed.
    """

    @property
    def transport(self) -> str: ...

    @property
    def received_bytes(self) -> int:
        """How many bytes of regions have come so far, those of reads under way too."""
        ...

    async def read_into(self, region: str, offset: int, into: memoryview, began: Began | None = None) -> None:
        """Fill `into` from `[offset, offset + len(into))` of the peer's region.

        Waits while the peer has not yet published those bytes; `began` is called once the peer gives them
        (more often where that takes several requests). The buffer belongs to the link until
        this returns or raises; after cancellation too, nothing is written into it any more once the
        call has ended. Raises RegionGone, LinkClosed, ProtocolError.
        """
        ...

    async def aclose(self) -> None:
        """Close; reads under way raise LinkClosed. Idempotent."""
        ...


@runtime_checkable
class CheckingLink(Protocol):
    """A Link whose reads are copies by this processor."""

    async def read_checked(
        self,
        region: str,
        offset: int,
        into: memoryview,
        check: Check,
        piece_bytes: int,
        began: Began | None = None,
    ) -> Sequence[int]:
        """As `read_into`; each piece is checked, in a thread, while the processor's cache has it.

        Returns the damaged units of all pieces. Raises what `check` raises, too.
        """
        ...


@runtime_checkable
class TurnLink(Protocol):
    """A Link whose peer can keep to a plan's order: the port is what several readers share."""

    async def read_in_turn(
        self, region: str, offset: int, into: memoryview, due: Due, began: Began | None = None
    ) -> None:
        """As `read_into`; what is due before at the peer goes before, unless it does not come."""
        ...


class Transport(Protocol):
    """Makes links of one kind."""

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
        """A read-only view. Only bytes that `wait_for` has promised may be read."""
        ...

    async def wait_for(self, offset: int, nbytes: int) -> None:
        """Return once the range is present and checked. Raises RegionGone if it never will be."""
        ...
