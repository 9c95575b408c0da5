"""K and V that stages put aside for whoever goes on with a sequence: for some seconds, and so many bytes."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from invoker.engine.kv_slices import KvSlice
from invoker.stages.link import StageKey

KEEP_S = 15.0
MOST_BYTES = 1 << 30

log = logging.getLogger("invoker.stages")


@dataclass(slots=True)
class _Kept:
    one: KvSlice
    expiry: asyncio.TimerHandle


class KvShelf:
    """By the key of the link for it. What is taken is gone; of too much the oldest goes first.

    A stage at work is asked for what somebody takes that is not there yet: the step that has it put aside may
    be behind many others. Belongs to the event loop's thread.
    """

    def __init__(self, *, keep_s: float = KEEP_S, most_bytes: int = MOST_BYTES) -> None:
        self._keep_s = keep_s
        self._most_bytes = most_bytes
        self._kept: OrderedDict[StageKey, _Kept] = OrderedDict()
        self._awaited: dict[StageKey, asyncio.Future[KvSlice]] = {}
        self._at_work: dict[StageKey, Callable[[str], None]] = {}

    def __repr__(self) -> str:
        return f"<KvShelf {len(self._kept)} slices, {self.nbytes} bytes, {len(self._awaited)} awaited>"

    @property
    def nbytes(self) -> int:
        return sum(kept.one.nbytes for kept in self._kept.values())

    def put(self, key: StageKey, one: KvSlice) -> None:
        awaited = self._awaited.pop(key, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(one)
            return
        self._pop(key)
        expiry = asyncio.get_running_loop().call_later(self._keep_s, self._pop, key)
        self._kept[key] = _Kept(one, expiry)
        while self.nbytes > self._most_bytes:
            oldest = next(iter(self._kept))
            self._pop(oldest)
            log.info("there is no room for what %s had of sequence %s", oldest, oldest.sequence)

    @contextmanager
    def asking(self, stage: StageKey, ask: Callable[[str], None]) -> Iterator[None]:
        """Inside, `ask` is told the sequences of that stage that somebody waits for."""
        self._at_work[stage] = ask
        try:
            yield
        finally:
            del self._at_work[stage]

    async def take(self, key: StageKey, within_s: float) -> KvSlice | None:
        """What was put there, as soon as it is; None if that takes too long, or another waits for it."""
        found = self._pop(key)
        if found is not None or key in self._awaited:
            return found
        awaited = self._awaited[key] = asyncio.get_running_loop().create_future()
        if (ask := self._at_work.get(replace(key, sequence=""))) is not None:
            ask(key.sequence)
        try:
            async with asyncio.timeout(within_s):
                return await awaited
        except TimeoutError:
            return None
        finally:
            if self._awaited.get(key) is awaited:
                del self._awaited[key]

    def clear(self) -> None:
        """Drop all."""
        for key in tuple(self._kept):
            self._pop(key)

    def _pop(self, key: StageKey) -> KvSlice | None:
        kept = self._kept.pop(key, None)
        if kept is None:
            return None
        kept.expiry.cancel()
        return kept.one
