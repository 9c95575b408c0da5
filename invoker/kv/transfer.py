"""The KV connector: fetches K and V of sequences that move from a pipeline to this node.

When a stage's node switches to whole-model serving, many calls arrive at once. Parallel transfers would share
this node's link and all time out, so that all would be recomputed: transfers run one at a time.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import Protocol

from invoker.base.errors import InvokerError
from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.slices import KvSlice, token_bytes
from invoker.kv.choice import KvCosts, KvDecision, KvLinkRates, KvMethod, KvPolicy, PrefillRate, decide_kv
from invoker.links.export_buffer import KEEP_S
from invoker.links.framing import LinkLost
from invoker.links.link import StageKey
from invoker.links.listener import SEND_KV_TIMEOUT_S, FetchedKv
from rdmacast.aio.groups import run_all
from rdmacast.link_rate import LinkRate
from registry.messages.live import KvLocation, KvStage

LATENCY_S = 0.002  # until the first byte
# However short the prefill: detecting a lost node takes as long.
MIN_TIMEOUT_S = 0.05

log = logging.getLogger("invoker.stages")


class KvSource(Protocol):
    """The part of StageListener that fetches K and V."""

    @property
    def url(self) -> str: ...

    async def fetch_kv(
        self, stage: KvStage, key: StageKey, shape: KvShape, max_tokens: int, timeout_s: float
    ) -> FetchedKv: ...


class KvConnector:
    """Fetches K and V from stages, which keep exports for `keep_s`. Belongs to the event loop's thread.

    `assumed` is the rate of links without a transfer yet.
    """

    def __init__(
        self,
        listener: KvSource,
        policy: KvPolicy,
        *,
        keep_s: float = KEEP_S,
        assumed: LinkRate | None = None,
    ) -> None:
        self._listener = listener
        self._policy = policy
        self._keep_s = keep_s
        self._links = KvLinkRates(assumed)
        self._link = asyncio.Lock()  # this node's link, first come first served
        self.loaded_tokens = 0

    def __repr__(self) -> str:
        return f"<KvMoves {self._policy}, {self.loaded_tokens} tokens loaded>"

    async def load(
        self, call_id: str, tokens: int, at: KvLocation, shape: KvShape, rate: PrefillRate
    ) -> Sequence[KvSlice]:
        """Fetch K and V of a prefix of `tokens` tokens, in all layers.

        Empty if recomputing is cheaper or the transfer times out.
        """
        decision = self._decide(tokens, at, shape, rate)
        if decision.method is KvMethod.RECOMPUTE:
            log.info("call %s: %s", call_id, decision.reason)
            return ()
        async with self._exclusive_link() as acquired:
            if acquired:
                return await self._load_in_turn(call_id, tokens, at, shape, rate)
        log.info("call %s: recomputing %d tokens: other transfers took too long", call_id, tokens)
        return ()

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
        decision = self._decide(tokens, at, shape, rate)  # again, with the rates measured meanwhile
        log.info("call %s: %s", call_id, decision.reason)
        if decision.method is KvMethod.RECOMPUTE:
            return ()
        # At worst the call then takes twice as long as recomputing alone.
        timeout_s = max(decision.recompute_s, MIN_TIMEOUT_S)
        if self._policy is KvPolicy.ALWAYS:
            timeout_s = SEND_KV_TIMEOUT_S
        started_s, received = _now_s(), list[KvStage]()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                slices = await self._fetch(tokens, at, shape, timeout_s, received)
        # Whatever failed, the tokens are here and can be recomputed.
        except (LinkLost, InvokerError, OSError, RuntimeError, MemoryError) as error:
            reason = str(error) or f"transfer timed out after {timeout_s:.3f} s"
            log.info("call %s: recomputing %d tokens: %s", call_id, tokens, reason)
            remote = self._remote_stages(at)
            if limit.expired() and not all(stage in received for stage in remote):
                self._links.record_timeout(_hosts(remote), _now_s() - started_s)
            return ()
        loaded = min(one.tokens for one in slices)
        self.loaded_tokens += loaded
        log.info("call %s: loaded K and V of %d of %d tokens", call_id, loaded, tokens)
        return slices

    def _decide(self, tokens: int, at: KvLocation, shape: KvShape, rate: PrefillRate) -> KvDecision:
        if self._policy is KvPolicy.ALWAYS:
            return _fixed_decision(KvMethod.TRANSFER, "always")
        if self._policy is KvPolicy.NEVER:
            return _fixed_decision(KvMethod.RECOMPUTE, "always")
        prefill = rate.tokens_per_s(shape.layers)
        if prefill is None:
            return _fixed_decision(KvMethod.RECOMPUTE, "prefill throughput unknown")
        remote = self._remote_stages(at)
        costs = KvCosts(
            token_layer_bytes=token_bytes(shape),
            link_bytes_per_s=self._links.bytes_per_s(_hosts(remote)) if remote else inf,
            prefill_tokens_per_s=prefill,
            latency_s=LATENCY_S,
            min_s=self._links.min_s(_hosts(remote)),
        )
        return decide_kv(tokens, sum(stage.last - stage.first for stage in remote), costs)

    def _remote_stages(self, at: KvLocation) -> list[KvStage]:
        """Return the stages whose K and V cross this node's link."""
        return [stage for stage in at.stages if stage.link != self._listener.url]

    async def _fetch(
        self, tokens: int, at: KvLocation, shape: KvShape, timeout_s: float, received: list[KvStage]
    ) -> list[KvSlice]:
        """Fetch from all stages in parallel; those done are added to `received`."""
        slices: list[KvSlice] = []
        spans: list[tuple[float, float]] = []  # of each remote transfer

        async def one(place: int) -> None:
            stage = at.stages[place]
            key = StageKey(pipeline=at.pipeline, epoch=at.epoch, place=place, sequence=at.sequence)
            found = await self._listener.fetch_kv(stage, key, shape, tokens, timeout_s)
            received.append(stage)
            slices.append(found.kv)
            if found.link_s > 0:
                spans.append((_now_s() - found.link_s, _now_s()))

        await run_all(*(one(place) for place in range(len(at.stages))))
        if spans:
            seconds = max(ended for _, ended in spans) - min(started for started, _ in spans)
            remote = self._remote_stages(at)
            layers = {(stage.first, stage.last) for stage in remote}
            nbytes = sum(one.nbytes for one in slices if (one.first, one.last) in layers)
            self._links.record_transfer(_hosts(remote), nbytes, seconds)
        return slices


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _hosts(stages: Sequence[KvStage]) -> frozenset[str]:
    return frozenset(stage.host for stage in stages)


def _fixed_decision(method: KvMethod, reason: str) -> KvDecision:
    return KvDecision(method=method, recompute_s=0.0, transfer_s=0.0, reason=f"{method}: {reason}")
