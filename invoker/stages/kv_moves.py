"""Where a sequence that a pipeline let go of goes on: its K and V fetched from the stages, or run again.

When a member switches many calls come at once. Side by side their transfers would share this node's link, all
come late, and all be computed after all: so one comes after the other, as they would be computed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import Protocol

from invoker.engine.kv_cache import KvShape
from invoker.engine.kv_slices import KvSlice, token_bytes
from invoker.errors import InvokerError
from invoker.stages.door import GIVE_KV_S, FetchedKv
from invoker.stages.frames import LinkLost
from invoker.stages.kv_choice import KvCosts, KvDecision, KvLinks, KvPolicy, KvWay, PrefillRate, decide_kv
from invoker.stages.kv_shelf import KEEP_S
from invoker.stages.link import StageKey
from invoker.together import together
from registry.live_messages import KvAt, KvStage

LATENCY_S = 0.002  # until the first bytes come
# However short a prefill is: to come to know that a node is gone takes as long.
LEAST_PATIENCE_S = 0.05

log = logging.getLogger("invoker.stages")


class KvSource(Protocol):
    """Where K and V come from: a Door is one."""

    @property
    def url(self) -> str: ...

    async def fetch_kv(
        self, stage: KvStage, key: StageKey, shape: KvShape, most_tokens: int, within_s: float
    ) -> FetchedKv: ...


class KvMoves:
    """Belongs to the event loop's thread. Stages keep what calls leave there for `keep_s`."""

    def __init__(self, door: KvSource, policy: KvPolicy, *, keep_s: float = KEEP_S) -> None:
        self._door = door
        self._policy = policy
        self._keep_s = keep_s
        self._links = KvLinks()
        self._link = asyncio.Lock()  # this node's: the first that comes has it first
        self.brought_tokens = 0

    def __repr__(self) -> str:
        return f"<KvMoves {self._policy}, {self.brought_tokens} tokens brought>"

    async def bring(
        self, call_id: str, tokens: int, at: KvAt, shape: KvShape, rate: PrefillRate
    ) -> Sequence[KvSlice]:
        """K and V in all layers of the first of so many tokens, by a model of `shape`; none where they are to
        be computed, since that is cheaper or they do not come in time."""
        decision = self._decide(tokens, at, shape, rate)
        if decision.way is KvWay.RECOMPUTE:
            log.info("call %s goes on: %s", call_id, decision.reason)
            return ()
        async with self._turn() as is_in_time:
            if is_in_time:
                return await self._fetched(call_id, tokens, at, shape, rate)
        log.info("call %s goes on by computing its %d tokens: others came before it", call_id, tokens)
        return ()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[bool]:
        """Inside, no other call's K and V come; False where they are not kept any more by then."""
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

    async def _fetched(
        self, call_id: str, tokens: int, at: KvAt, shape: KvShape, rate: PrefillRate
    ) -> Sequence[KvSlice]:
        decision = self._decide(tokens, at, shape, rate)  # anew: those before it tell how fast the link is
        log.info("call %s goes on: %s", call_id, decision.reason)
        if decision.way is KvWay.RECOMPUTE:
            return ()
        # Then it is no later than twice what computing alone would have taken.
        within_s = max(decision.recompute_s, LEAST_PATIENCE_S)
        if self._policy is KvPolicy.ALWAYS:
            within_s = GIVE_KV_S
        began_s, came = _now_s(), list[KvStage]()
        try:
            async with asyncio.timeout(within_s) as limit:
                slices = await self._fetch(tokens, at, shape, within_s, came)
        # Whatever it was, the tokens are here, and can be computed.
        except (LinkLost, InvokerError, OSError, RuntimeError, MemoryError) as error:
            why = str(error) or f"not within {within_s:.3f} s"
            log.info("call %s goes on by computing its %d tokens: %s", call_id, tokens, why)
            elsewhere = self._elsewhere(at)
            if limit.expired() and not all(stage in came for stage in elsewhere):
                self._links.missed(_hosts(elsewhere), _now_s() - began_s)
            return ()
        brought = min(one.tokens for one in slices)
        self.brought_tokens += brought
        log.info("call %s has K and V of %d of its %d tokens brought", call_id, brought, tokens)
        return slices

    def _decide(self, tokens: int, at: KvAt, shape: KvShape, rate: PrefillRate) -> KvDecision:
        if self._policy is KvPolicy.ALWAYS:
            return _told(KvWay.TRANSFER, "always")
        if self._policy is KvPolicy.NEVER:
            return _told(KvWay.RECOMPUTE, "always")
        prefill = rate.tokens_per_s(shape.layers)
        if prefill is None:
            return _told(KvWay.RECOMPUTE, "nothing is known of prefill here")
        elsewhere = self._elsewhere(at)
        costs = KvCosts(
            token_layer_bytes=token_bytes(shape),
            link_bytes_per_s=self._links.bytes_per_s(_hosts(elsewhere)) if elsewhere else inf,
            prefill_tokens_per_s=prefill,
            latency_s=LATENCY_S,
            least_s=self._links.least_s(_hosts(elsewhere)),
        )
        return decide_kv(tokens, sum(stage.last - stage.first for stage in elsewhere), costs)

    def _elsewhere(self, at: KvAt) -> list[KvStage]:
        """What K and V come from over this node's link, side by side."""
        return [stage for stage in at.stages if stage.link != self._door.url]

    async def _fetch(
        self, tokens: int, at: KvAt, shape: KvShape, within_s: float, came: list[KvStage]
    ) -> list[KvSlice]:
        """Of all stages; `came` has those of which they are here."""
        slices: list[KvSlice] = []
        spans: list[tuple[float, float]] = []  # in which bytes came over the link

        async def one(place: int) -> None:
            stage = at.stages[place]
            key = StageKey(pipeline=at.pipeline, epoch=at.epoch, place=place, sequence=at.sequence)
            found = await self._door.fetch_kv(stage, key, shape, tokens, within_s)
            came.append(stage)
            slices.append(found.kv)
            if found.link_s > 0:
                spans.append((_now_s() - found.link_s, _now_s()))

        await together(*(one(place) for place in range(len(at.stages))))
        if spans:
            seconds = max(ended for _, ended in spans) - min(began for began, _ in spans)
            elsewhere = self._elsewhere(at)
            layers = {(stage.first, stage.last) for stage in elsewhere}
            nbytes = sum(one.nbytes for one in slices if (one.first, one.last) in layers)
            self._links.came(_hosts(elsewhere), nbytes, seconds)
        return slices


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _hosts(stages: Sequence[KvStage]) -> frozenset[str]:
    return frozenset(stage.host for stage in stages)


def _told(way: KvWay, why: str) -> KvDecision:
    return KvDecision(way=way, recompute_s=0.0, transfer_s=0.0, reason=f"{way}: {why}")
