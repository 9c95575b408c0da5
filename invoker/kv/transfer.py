"""The KV connector: exchanges K and V of sequences that move from a pipeline or instance to another node.

When a stage's node switches to whole-model serving, many calls arrive at once. Parallel transfers would share
this node's link and all time out, so that all would be recomputed: transfers run one at a time.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from invoker.base.errors import InvokerError
from invoker.engine.kv.cache import PAGE_TOKENS, KvShape
from invoker.engine.kv.export import ExportKv
from invoker.engine.kv.slices import KvSlice
from invoker.kv.choice import KvPolicy, MissedDeadlines, PrefillRate
from invoker.links.export_buffer import KEEP_S, MAX_BYTES, KvExportBuffer
from invoker.links.framing import LinkLost
from invoker.links.link import StageKey
from invoker.links.listener import SEND_KV_TIMEOUT_S
from rdmacast.aio.groups import cancel_and_discard, run_all
from registry.messages.live import KvLocation, KvStage

# However short the prefill: detecting a lost node takes as long.
MIN_TIMEOUT_S = 0.05

log = logging.getLogger("invoker.stages")


class KvSource(Protocol):
    """The part of StageListener that fetches K and V, and keeps those that others fetch from here."""

    host: str
    exports: KvExportBuffer

    @property
    def url(self) -> str: ...

    async def fetch_kv(
        self, stage: KvStage, key: StageKey, shape: KvShape, max_tokens: int, timeout_s: float
    ) -> KvSlice: ...


class _Prefetch(NamedTuple):
    """A transfer that was begun before its sequence is to continue here."""

    task: asyncio.Task[list[KvSlice]]
    nbytes: int


class KvConnector:
    """Fetches K and V from stages, which keep exports for `keep_s`, and exports those of this node.

    Belongs to the event loop's thread.
    """

    def __init__(self, listener: KvSource, policy: KvPolicy, *, keep_s: float = KEEP_S) -> None:
        self._listener = listener
        self._policy = policy
        self._keep_s = keep_s
        self._missed = MissedDeadlines()
        self._link = asyncio.Lock()  # this node's link, first come first served
        self._prefetched: dict[tuple[str, str], _Prefetch] = {}
        self.loaded_tokens = 0

    def __repr__(self) -> str:
        return f"<KvConnector {self._policy}, {self.loaded_tokens} tokens loaded>"

    async def load(
        self, call_id: str, tokens: int, at: KvLocation, shape: KvShape, rate: PrefillRate
    ) -> Sequence[KvSlice]:
        """Fetch K and V of a prefix of `tokens` tokens, in all layers.

        Empty if the transfer takes longer than recomputing, or that is unknown.
        """
        prefetch = self._prefetched.pop(_name(at), None)
        if prefetch is not None:
            return await self._rest_of(prefetch, call_id, tokens, at, shape, rate)
        timeout_s, reason = self._deadline(tokens, at, shape, rate)
        if not timeout_s:
            log.info("call %s: recompute: %s", call_id, reason)
            return ()
        async with self._exclusive_link() as acquired:
            if acquired:
                return await self._load_in_turn(call_id, tokens, at, shape, rate)
        log.info("call %s: recomputing %d tokens: other transfers took too long", call_id, tokens)
        return ()

    def prefetch(self, at: KvLocation, tokens: int, shape: KvShape) -> None:
        """Begin to fetch K and V that may still be being exported; `load` waits for what is left of them.

        They come as fast as the prompt runs, so they do not wait for other transfers. They are kept for
        `keep_s`. Without effect beyond MAX_BYTES of all, or where K and V are never fetched.
        """
        nbytes = tokens * shape.page_bytes // PAGE_TOKENS
        coming = sum(one.nbytes for one in self._prefetched.values())
        if self._policy is KvPolicy.NEVER or coming + nbytes > MAX_BYTES or _name(at) in self._prefetched:
            return
        fetching = self._fetch(tokens, at, shape, SEND_KV_TIMEOUT_S, [])
        task = asyncio.create_task(fetching, name=f"prefetch of {at.sequence}")
        prefetch = self._prefetched[_name(at)] = _Prefetch(task, nbytes)
        task.add_done_callback(lambda _: self._keep(at, prefetch))

    async def aclose(self) -> None:
        """End all transfers that were begun by `prefetch`."""
        prefetched, self._prefetched = list(self._prefetched.values()), {}
        await cancel_and_discard(*(one.task for one in prefetched))

    def _keep(self, at: KvLocation, prefetch: "_Prefetch") -> None:
        """Keep what has arrived for a while, unless it is waited for."""

        if not prefetch.task.cancelled():
            prefetch.task.exception()  # raised again in `load`, if that is called

        def drop() -> None:
            if self._prefetched.get(_name(at)) is prefetch:
                del self._prefetched[_name(at)]

        asyncio.get_running_loop().call_later(self._keep_s, drop)

    async def _rest_of(
        self,
        prefetch: "_Prefetch",
        call_id: str,
        tokens: int,
        at: KvLocation,
        shape: KvShape,
        rate: PrefillRate,
    ) -> Sequence[KvSlice]:
        """Return what was prefetched, after waiting for the rest of it no longer than recomputing takes."""
        timeout_s, _ = self._deadline(tokens, at, shape, rate)
        try:
            async with asyncio.timeout(timeout_s or self._keep_s):
                slices = await prefetch.task
        except (LinkLost, InvokerError, OSError, RuntimeError, MemoryError) as error:
            log.info("call %s: recomputing %d tokens: %s", call_id, tokens, str(error) or "too late")
            return ()
        loaded = min(one.tokens for one in slices)
        self.loaded_tokens += loaded
        log.info("call %s: loaded K and V of %d tokens while its prompt ran", call_id, loaded)
        return slices

    @asynccontextmanager
    async def _exclusive_link(self) -> AsyncIterator[bool]:
        """Hold this node's link for one call's transfer; yield False if its exports have expired by then."""
        try:
            async with asyncio.timeout(self._keep_s):
                await self._link.acquire()
        except TimeoutError:
            yield False
            return
        try:
            yield True
        finally:
            self._link.release()

    async def _load_in_turn(
        self, call_id: str, tokens: int, at: KvLocation, shape: KvShape, rate: PrefillRate
    ) -> Sequence[KvSlice]:
        timeout_s, reason = self._deadline(tokens, at, shape, rate)  # again: others may have missed theirs
        if not timeout_s:
            log.info("call %s: recompute: %s", call_id, reason)
            return ()
        log.info("call %s: transfer: %s", call_id, reason)
        received = list[KvStage]()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                slices = await self._fetch(tokens, at, shape, timeout_s, received)
        # Whatever failed, the tokens are here and can be recomputed.
        except (LinkLost, InvokerError, OSError, RuntimeError, MemoryError) as error:
            reason = str(error) or f"transfer timed out after {timeout_s:.3f} s"
            log.info("call %s: recomputing %d tokens: %s", call_id, tokens, reason)
            if limit.expired() and not all(stage in received for stage in self._remote_stages(at)):
                self._missed.record(self._hosts(at), timeout_s)
            return ()
        self._missed.forget(self._hosts(at))
        loaded = min(one.tokens for one in slices)
        self.loaded_tokens += loaded
        log.info("call %s: loaded K and V of %d of %d tokens", call_id, loaded, tokens)
        return slices

    def exporter(self, instance_id: str) -> ExportKv:
        """Return a function by which any thread exports K and V of an instance's sequences."""
        return self._listener.exports.exporter(StageKey(pipeline=instance_id, epoch=0, place=0))

    def location(self, instance_id: str, layers: int, sequence: str) -> KvLocation:
        """Return where an instance with that many layers has exported a sequence's K and V."""
        stage = KvStage(link=self._listener.url, host=self._listener.host, first=0, last=layers)
        return KvLocation(pipeline=instance_id, epoch=0, sequence=sequence, stages=(stage,))

    def _deadline(self, tokens: int, at: KvLocation, shape: KvShape, rate: PrefillRate) -> tuple[float, str]:
        """Return the seconds that a transfer may take, 0 for none, with the reason.

        They are those of recomputing: at worst the call takes twice as long.
        """
        if self._policy is KvPolicy.ALWAYS:
            return SEND_KV_TIMEOUT_S, "always"
        if self._policy is KvPolicy.NEVER:
            return 0.0, "always"
        prefill = rate.tokens_per_s(shape.layers)
        if prefill is None:
            return 0.0, "prefill throughput unknown"
        deadline_s = max(tokens / prefill, MIN_TIMEOUT_S)
        reason = f"recomputing {tokens} tokens takes {tokens / prefill * 1e3:.1f} ms"
        if self._missed.covers(self._hosts(at), deadline_s):
            return 0.0, f"{reason}, and recent transfers took longer"
        return deadline_s, reason

    def _remote_stages(self, at: KvLocation) -> list[KvStage]:
        """Return the stages whose K and V cross this node's link."""
        return [stage for stage in at.stages if stage.link != self._listener.url]

    def _hosts(self, at: KvLocation) -> frozenset[str]:
        return frozenset(stage.host for stage in self._remote_stages(at))

    async def _fetch(
        self, tokens: int, at: KvLocation, shape: KvShape, timeout_s: float, received: list[KvStage]
    ) -> list[KvSlice]:
        """Fetch from all stages in parallel; those done are added to `received`."""
        slices: list[KvSlice] = []

        async def one(place: int, stage: KvStage) -> None:
            key = StageKey(pipeline=at.pipeline, epoch=at.epoch, place=place, sequence=at.sequence)
            slices.append(await self._listener.fetch_kv(stage, key, shape, tokens, timeout_s))
            received.append(stage)

        await run_all(*(one(place, stage) for place, stage in enumerate(at.stages)))
        return slices


def _name(at: KvLocation) -> tuple[str, str]:
    """Return what names an export: its stages are those of one pipeline or instance."""
    return f"{at.pipeline}.{at.epoch}", at.sequence
