"""Pulls a whole region from the first of several holders that serves it, and checks each block."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType

from rdmacast.aio.shielded import join_shielded
from rdmacast.aio.threads import run_in_thread
from rdmacast.cast.progress import BlockFetch, PullProgress
from rdmacast.errors import CastError, NotShared
from rdmacast.transport import PeerAddress, TransportChoice
from rdmacast.transports.connector import Connector, PeerLinks

logger = logging.getLogger(__name__)

Check = Callable[[int, memoryview], Sequence[int]]
OnBlock = Callable[[int, int], None]
Prepare = Callable[[int, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """A region to pull and its sources, best first. `block_bytes` is a multiple of the checked unit.

    `window` blocks are read or checked at once. With `stall_timeout_s` the sources in use are dropped when
    no byte of the pull has arrived for that long, whatever the cause: a dead dial, a silent link, a source
    that itself waits for the bytes (two that wait for each other end so). A slow link that makes progress
    is kept. With None a pull waits as long as its links live.
    """

    region: str
    nbytes: int
    block_bytes: int
    sources: tuple[PeerAddress, ...]
    window: int = 4
    max_tries: int = 3
    stall_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.window <= 0:
            raise ValueError(f"a pull's window must be above 0, not {self.window}")
        if self.stall_timeout_s is not None and self.stall_timeout_s <= 0:
            raise ValueError(f"a pull's stall timeout must be above 0, not {self.stall_timeout_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PullResult:
    """The result of a pull. Bytes of damaged blocks are included: they crossed the link."""

    nbytes: int
    seconds: float
    retries: int
    bytes_by_transport: Mapping[str, int]
    bytes_by_source: Mapping[str, int]
    choices: Mapping[str, TransportChoice]  # by source: the transport that served it last, and why


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The end of a fetch: `units` are damaged ones; with `error` no bytes arrived."""

    fetch: BlockFetch
    transport: str = ""
    units: Sequence[int] = ()
    error: CastError | None = None


class _StallWatch:
    """A watchdog that cancels reads when no byte has arrived for `timeout_s`; None never does."""

    def __init__(self, timeout_s: float | None, links: PeerLinks) -> None:
        self._timeout_s = timeout_s
        self._links = links
        self._reads: set[asyncio.Timeout] = set()
        self._received = 0
        self._moved_s = 0.0

    @property
    def check_interval_s(self) -> float | None:
        return None if self._timeout_s is None else self._timeout_s / 8

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Watch a read inside. Raises CastError if it is cancelled."""
        if not self._reads:
            self._moved_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(None) as limit:
                self._reads.add(limit)
                try:
                    yield
                finally:
                    self._reads.discard(limit)
        except TimeoutError as error:
            raise CastError(f"no byte arrived for {self._timeout_s:g} s") from error

    def check(self) -> None:
        if self._timeout_s is None:
            return
        now_s, received = asyncio.get_running_loop().time(), self._links.received_bytes
        if received != self._received:
            self._received, self._moved_s = received, now_s
        elif self._reads and now_s - self._moved_s >= self._timeout_s:
            reads, self._reads = self._reads, set()
            for limit in reads:
                limit.reschedule(now_s)


class _Pull:
    """The state of one pull."""

    def __init__(
        self,
        plan: PullPlan,
        into: memoryview,
        links: PeerLinks,
        check: Check,
        prepare: Prepare | None,
        executor: Executor | None,
    ) -> None:
        self._plan = plan
        self._into = into
        self._links = links
        self._check = check
        self._prepare = prepare
        self._executor = executor
        self._watch = _StallWatch(plan.stall_timeout_s, links)
        self.progress = PullProgress(plan.nbytes, plan.block_bytes, len(plan.sources), plan.max_tries)
        self.by_transport: dict[str, int] = {}
        self.by_source: dict[str, int] = {}

    async def run(self, on_block: OnBlock) -> None:
        in_flight: set[asyncio.Task[_Outcome]] = set()
        try:
            while not self.progress.is_complete:
                while len(in_flight) < self._plan.window and (fetch := self.progress.assign()):
                    in_flight.add(asyncio.create_task(self._fetch(fetch)))
                ended, in_flight = await asyncio.wait(
                    in_flight, timeout=self._watch.check_interval_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    self._settle(task.result(), on_block)
                self._watch.check()
        finally:
            # The caller owns the destination again when this returns: nothing may write to it then.
            for task in in_flight:
                task.cancel()
            await join_shielded(in_flight)

    async def _fetch(self, fetch: BlockFetch) -> _Outcome:
        block = self._into[fetch.offset : fetch.offset + fetch.nbytes]
        prepare = self._prepare
        if prepare is not None:
            await run_in_thread(prepare, fetch.offset, fetch.nbytes, executor=self._executor)
        try:
            async with self._watch.reading():
                transport = await self._read(fetch, block)
        except CastError as error:
            return _Outcome(fetch, error=error)
        units = await run_in_thread(self._check, fetch.offset, block, executor=self._executor)
        return _Outcome(fetch, transport, units)

    async def _read(self, fetch: BlockFetch, block: memoryview) -> str:
        """Read a block; returns the transport, the best that can serve the region."""
        while True:
            link = await self._links.get(fetch.source)
            try:
                await link.read_into(self._plan.region, fetch.offset, block)
                return link.transport
            except NotShared as error:
                logger.info("%s; trying another transport", error)
                self._links.avoid(fetch.source, link)

    def _settle(self, outcome: _Outcome, on_block: OnBlock) -> None:
        fetch, source = outcome.fetch, self._plan.sources[outcome.fetch.source].url
        if outcome.error is not None:
            if not self.progress.is_lost(fetch.source):
                logger.warning("region %s: dropping source %s: %s", self._plan.region, source, outcome.error)
            self.progress.lost(fetch, str(outcome.error) or type(outcome.error).__name__)
            return
        self.by_transport[outcome.transport] = self.by_transport.get(outcome.transport, 0) + fetch.nbytes
        self.by_source[source] = self.by_source.get(source, 0) + fetch.nbytes
        if outcome.units:
            logger.warning("region %s: damaged units %s from %s", self._plan.region, outcome.units, source)
            self.progress.damaged(fetch, outcome.units)
        else:
            self.progress.arrived(fetch)
            on_block(fetch.offset, fetch.nbytes)


async def pull(
    plan: PullPlan,
    into: memoryview,
    *,
    connector: Connector,
    check: Check,
    on_block: OnBlock,
    prepare: Prepare | None = None,
    executor: Executor | None = None,
) -> PullResult:
    """Fill `into` with the region.

    `check(offset, view)` runs in a thread on each block that arrived and returns the indexes of its damaged
    units; `on_block(offset, nbytes)` then runs on the event loop, in the order in which good blocks arrive.
    `prepare(offset, nbytes)` runs in a thread before the destination of a block is written to, while blocks
    before it arrive; what it raises ends the pull. Raises ChecksumError or NoHolder; blocks reported by
    `on_block` stay valid. When this returns or raises, also by cancellation, nothing writes into `into` any
    more.
    """
    if into.readonly or into.nbytes != plan.nbytes:
        raise ValueError(f"the destination must be {plan.nbytes} writable bytes, not {into.nbytes}")
    started_s = time.monotonic()
    async with AsyncExitStack() as stack:
        links = PeerLinks(connector, plan.sources, stack)
        running = _Pull(plan, into.cast("B"), links, check, prepare, executor)
        await running.run(on_block)
        return PullResult(
            nbytes=plan.nbytes,
            seconds=time.monotonic() - started_s,
            retries=running.progress.retries,
            bytes_by_transport=MappingProxyType(running.by_transport),
            bytes_by_source=MappingProxyType(running.by_source),
            choices=MappingProxyType(links.choices),
        )
