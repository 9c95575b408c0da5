"""Reads blocks of a region from peers into memory, over the best link to each peer, and checks them."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from typing import Self, TypeGuard

from rdmacast.aio.threads import run_in_thread
from rdmacast.cast.hooks import BlockHooks
from rdmacast.cast.spec import CastSpec
from rdmacast.destination import BlockMemory
from rdmacast.errors import CastError, LinkClosed, NotShared, PeerUnreachable
from rdmacast.plan_slot import PlanSlot
from rdmacast.transport import CheckingLink, Link, OnStart, SlottedLink, TransportChoice
from rdmacast.transports.connector import Connector, PeerLinks

logger = logging.getLogger(__name__)

_CHECKED_INLINE_BYTES = 1 << 20  # checked faster than a thread is scheduled


@dataclass(frozen=True, slots=True)
class ReceivedBlock:
    """A block that was received; `units` are the damaged ones."""

    transport: str
    units: Sequence[int]


class BlockReads:
    """The reads of one cast; leaving it returns their links to the connector, which closes or keeps them."""

    def __init__(
        self,
        spec: CastSpec,
        memory: BlockMemory,
        connector: Connector,
        hooks: BlockHooks,
    ) -> None:
        self._spec = spec
        self._memory = memory
        self._stack = AsyncExitStack()
        self._links = PeerLinks(connector, [member.peer for member in spec.plan.members], self._stack)
        self._hooks = hooks
        self._check_bytes = hooks.check_bytes or spec.plan.block_bytes

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def choices(self) -> Mapping[str, TransportChoice]:
        """The transport that served each peer last, and why, by the peer's address."""
        return self._links.choices

    async def read(
        self, block: int, source: int, on_start: OnStart, slot: PlanSlot | None = None
    ) -> ReceivedBlock:
        """Fill the block's place in the memory, in its slot if it has one.

        Raises CastError (PeerUnreachable if no connection could be opened), and what the hooks and the memory
        raise.
        """
        offset, nbytes = self._memory.wanted(*self._spec.extent(block))
        async with self._memory.lend(offset, nbytes) as into:
            if self._hooks.prepare is not None:
                await run_in_thread(self._hooks.prepare, offset, nbytes, executor=self._hooks.executor)
            received = await self._receive(source, offset, into, on_start, slot)
            if not received.units:
                await self._memory.keep(offset, into)
            return received

    async def _receive(
        self, source: int, offset: int, into: memoryview, on_start: OnStart, slot: PlanSlot | None
    ) -> ReceivedBlock:
        """Read and check the bytes, over the next best transport where one does not share them."""
        while True:
            link = None
            try:
                link = await self._links.get(source)
                damaged = await self._read_over(link, offset, into, on_start, slot)
                self._links.confirm(link)
                return ReceivedBlock(link.transport, damaged)
            except NotShared as error:
                if link is None:
                    raise
                logger.info("%s; trying another transport", error)
                self._links.avoid(source, link)
            except CastError as error:
                is_closed = isinstance(error, LinkClosed)
                if link is not None and is_closed and self._links.drop_if_stale(source, link):
                    continue
                if link is not None or not self._spec.is_pull:  # a pull dials each source once
                    self._links.forget(source, link)
                if link is None and is_closed:
                    raise PeerUnreachable(str(error)) from error
                raise

    async def _read_over(
        self, link: Link, offset: int, into: memoryview, on_start: OnStart, slot: PlanSlot | None
    ) -> Sequence[int]:
        """Return the damaged units of the block."""
        region, check = self._spec.plan.image, self._hooks.check
        if _checks(link):
            return await link.read_checked(region, offset, into, check, self._check_bytes, on_start)
        if slot is not None and _keeps_turns(link):
            await link.read_in_slot(region, offset, into, slot, on_start)
        else:
            await link.read_into(region, offset, into, on_start)
        if len(into) <= _CHECKED_INLINE_BYTES:
            return check(offset, into)
        return await run_in_thread(check, offset, into, executor=self._hooks.executor)


def _checks(link: Link) -> TypeGuard[CheckingLink]:
    return _is_a(type(link), CheckingLink)


def _keeps_turns(link: Link) -> TypeGuard[SlottedLink]:
    return _is_a(type(link), SlottedLink)


@cache
def _is_a(kind: type, protocol: type) -> bool:
    """Cache the check, which is slow for protocols and is needed for every block."""
    return issubclass(kind, protocol)
