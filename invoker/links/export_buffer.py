"""K and V exported by stages and instances, kept for a few seconds until another node fetches them."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from invoker.engine.kv.export import ExportKv, KvExport
from invoker.links.link import StageKey

KEEP_S = 15.0
MAX_BYTES = 1 << 30

log = logging.getLogger("invoker.stages")


@dataclass(slots=True)
class _ExportedKv:
    kv: KvExport
    expiry: asyncio.TimerHandle


class KvExportBuffer:
    """A bounded buffer of exports, complete or under way, by stage key and sequence; each is fetched once.

    They are kept for `keep_s` after they are complete; beyond `max_bytes` the oldest is evicted. Belongs to
    the event loop's thread.
    """

    def __init__(self, *, keep_s: float = KEEP_S, max_bytes: int = MAX_BYTES) -> None:
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._exports: OrderedDict[StageKey, _ExportedKv] = OrderedDict()
        self._waiters: dict[StageKey, asyncio.Future[KvExport]] = {}
        self._on_request: dict[StageKey, Callable[[str], None]] = {}

    def __repr__(self) -> str:
        waiters = len(self._waiters)
        return f"<KvExportBuffer {len(self._exports)} exports, {self.nbytes} bytes, {waiters} waiters>"

    @property
    def nbytes(self) -> int:
        """Bytes of all exports, as if complete."""
        return sum(exported.kv.nbytes for exported in self._exports.values())

    def add(self, key: StageKey, kv: KvExport) -> None:
        """Keep an export, or deliver it to the waiter for it."""
        waiter = self._waiters.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(kv)
            return
        self._remove(key)
        expiry = asyncio.get_running_loop().call_later(self._keep_s, self._expire, key)
        self._exports[key] = _ExportedKv(kv, expiry)
        while self.nbytes > self._max_bytes:
            oldest = next(iter(self._exports))
            self._remove(oldest)
            log.info("%s: evicted exported K and V of sequence %s: buffer full", oldest, oldest.sequence)

    def exporter(self, stage: StageKey) -> ExportKv:
        """Return a function by which any thread exports K and V of a stage's sequences."""
        loop = asyncio.get_running_loop()

        def export(sequence: str, kv: KvExport) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.add, replace(stage, sequence=sequence), kv)

        return export

    @contextmanager
    def on_request(self, stage: StageKey, request: Callable[[str], None]) -> Iterator[None]:
        """Call `request(sequence)` while the block lasts, for each export awaited from that stage.

        The step that would export it may be queued behind many others.
        """
        self._on_request[stage] = request
        try:
            yield
        finally:
            del self._on_request[stage]

    async def pop(self, key: StageKey, timeout_s: float) -> KvExport | None:
        """Remove and return an export, waiting for it; None after `timeout_s` or if another caller waits."""
        found = self._remove(key)
        if found is not None or key in self._waiters:
            return found
        waiter = self._waiters[key] = asyncio.get_running_loop().create_future()
        if (request := self._on_request.get(replace(key, sequence=""))) is not None:
            request(key.sequence)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            return None
        finally:
            if self._waiters.get(key) is waiter:
                del self._waiters[key]

    def clear(self) -> None:
        """Remove all exports."""
        for key in tuple(self._exports):
            self._remove(key)

    def _expire(self, key: StageKey) -> None:
        exported = self._exports[key]
        if exported.kv.is_under_way:
            exported.expiry = asyncio.get_running_loop().call_later(self._keep_s, self._expire, key)
        else:
            self._remove(key)

    def _remove(self, key: StageKey) -> KvExport | None:
        exported = self._exports.pop(key, None)
        if exported is None:
            return None
        exported.expiry.cancel()
        return exported.kv
