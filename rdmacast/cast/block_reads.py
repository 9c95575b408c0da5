"""Reads blocks of a region from peers into a buffer, and checks them, by whatever link each peer has."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from typing import Self, TypeGuard

from rdmacast.cast_spec import CastSpec
from rdmacast.connector import Connector, PeerLinks
from rdmacast.due import Due
from rdmacast.errors import CastError, NotShared
from rdmacast.transport import Began, Check, CheckingLink, Choice, Link, TurnLink
from rdmacast.waiting import run_in_thread

logger = logging.getLogger(__name__)

Prepare = Callable[[int, int], object]

_CHECKED_HERE_BYTES = 1 << 20  # checked faster than a thread takes its turn


@dataclass(frozen=True, slots=True)
class Came:
    """A block as it came; `units` are damaged ones."""

    transport: str
    units: Sequence[int]


class BlockReads:
    """Of one cast; `check`, `check_bytes` and `prepare` are those of `Cast`. Leaving it closes its links."""

    def __init__(
        self,
        spec: CastSpec,
        buffer: memoryview,
        *,
        connector: Connector,
        check: Check,
        check_bytes: int | None,
        prepare: Prepare | None,
        executor: Executor | None,
    ) -> None:
        self._spec = spec
        self._buffer = buffer
        self._stack = AsyncExitStack()
        self._links = PeerLinks(connector, [member.address for member in spec.members], self._stack)
        self._check = check
        self._check_bytes = check_bytes or spec.block_bytes
        self._prepare = prepare
        self._executor = executor

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def choices(self) -> Mapping[str, Choice]:
        """By a peer's address: the transport that served it last, and why."""
        return self._links.choices

    async def read(self, block: int, source: int, began: Began, due: Due | None = None) -> Came:
        """Fill the block's place in the buffer, in its turn where it is due.

        Raises CastError, and what `check` and `prepare` raise.
        """
        offset, nbytes = self._spec.extent(block)
        into, prepare = self._buffer[offset : offset + nbytes], self._prepare
        if prepare is not None:
            await run_in_thread(self._executor, lambda: prepare(offset, nbytes))
        while True:
            link = None
            try:
                link = await self._links.get(source)
                return Came(link.transport, await self._read_over(link, offset, into, began, due))
            except NotShared as error:
                if link is None:
                    raise
                logger.info("%s; trying another transport", error)
                self._links.avoid(source, link)
            except CastError:
                self._links.forget(source, link)
                raise

    async def _read_over(
        self, link: Link, offset: int, into: memoryview, began: Began, due: Due | None
    ) -> Sequence[int]:
        """The damaged units of what came."""
        region, check = self._spec.region, self._check
        if _checks(link):
            return await link.read_checked(region, offset, into, check, self._check_bytes, began)
        if due is not None and _keeps_turns(link):
            await link.read_in_turn(region, offset, into, due, began)
        else:
            await link.read_into(region, offset, into, began)
        if len(into) <= _CHECKED_HERE_BYTES:
            return check(offset, into)
        return await run_in_thread(self._executor, lambda: check(offset, into))


def _checks(link: Link) -> TypeGuard[CheckingLink]:
    return _is_a(type(link), CheckingLink)


def _keeps_turns(link: Link) -> TypeGuard[TurnLink]:
    return _is_a(type(link), TurnLink)


@cache
def _is_a(kind: type, protocol: type) -> bool:
    """To ask a protocol takes long, for a question of every block."""
    return issubclass(kind, protocol)
