"""The native engine while vLLM starts, then vLLM: sequences move from prompt and tokens so far."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from invoker.engine.contract import EngineCall, NewSequence, TokenOutput
from invoker.engine.engine_load import EngineLoad
from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.entry import EntryFormat, LayerEntry
from invoker.engine.kv.slices import KvSlice
from invoker.engine.runner import EngineRunner
from invoker.vllm.client import ServerLost
from invoker.vllm.runner import VllmRunner
from rdmacast.aio.groups import cancel_and_wait
from rdmacast.aio.shielded import run_shielded
from registry.messages.forward import ForwardedChunk, ForwardedHead, ForwardRequest


class NativeFirst:
    """An instance's two engines, one after the other. Belongs to the event loop's thread.

    Requests that need vLLM's own server wait for it. `on_vllm` is called when it is ready, `on_native_ended`
    once the native engine has ended, so that its memory can be freed. If vLLM does not start, the instance
    fails: see `failure`.
    """

    load: EngineLoad | None = None  # the native engine's would be taken for that of vLLM

    def __init__(
        self,
        native: EngineRunner,
        starting: "asyncio.Task[VllmRunner]",
        *,
        on_vllm: Callable[[], None],
        on_native_ended: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._native = native
        self._starting = starting
        self._vllm: VllmRunner | None = None
        self._on_vllm = on_vllm
        self._on_native_ended = on_native_ended
        self._sequences = 0  # on the native engine
        self._native_idle = asyncio.Event()
        self._native_idle.set()
        self.failure: Exception | None = None
        self._task = asyncio.create_task(self._run(), name="native first")

    def __repr__(self) -> str:
        return (
            f"<NativeFirst {self._vllm or self._native!r}, {self._sequences} sequences on the native engine>"
        )

    @property
    def _has_vllm(self) -> bool:
        return self._vllm is not None

    @property
    def kv_shape(self) -> KvShape | None:
        return self._native.kv_shape if self._vllm is None else None

    @property
    def entry_format(self) -> EntryFormat | None:
        return self._native.entry_format if self._vllm is None else None

    @property
    def kv_tokens(self) -> tuple[int, int]:
        return self._native.kv_tokens if self._vllm is None else self._vllm.kv_tokens

    async def generate(
        self,
        sequence: NewSequence,
        call: EngineCall,
        kv: Sequence[KvSlice] = (),
        *,
        entry: LayerEntry | None = None,
    ) -> AsyncGenerator[TokenOutput, None]:
        """Yield a sequence's outputs, of both engines if vLLM becomes ready meanwhile."""
        if self._vllm is None:
            made = list(sequence.generated_ids)
            async with aclosing(self._by_native(sequence, call, kv, entry)) as outputs:
                async for output in outputs:
                    yield output
                    if output.finish_reason or output.error:
                        return
                    if output.token_id is not None:
                        made.append(output.token_id)
                    if self._has_vllm:
                        break
            sequence = replace(sequence, generated_ids=tuple(made))
        async with aclosing(self._started().generate(sequence, call)) as outputs:
            async for output in outputs:
                yield output

    async def forward(
        self, request: ForwardRequest, call: EngineCall
    ) -> AsyncGenerator[ForwardedHead | ForwardedChunk, None]:
        """Pass a request through to vLLM, once it is ready."""
        await asyncio.wait([self._starting])
        async with aclosing(self._started().forward(request, call)) as replies:
            async for reply in replies:
                yield reply

    async def wait_closed(self) -> None:
        """Return once vLLM could not be started, or an engine has failed."""
        await asyncio.wait([self._task])

    async def aclose(self) -> None:
        """End both engines. Idempotent."""
        await cancel_and_wait(self._task, self._starting)
        await self._native.aclose()  # first, as its sequences would go on to vLLM
        if not self._starting.cancelled() and self._starting.exception() is None:
            await self._starting.result().aclose()

    def _started(self) -> VllmRunner:
        """Return vLLM, after the end of its start. Raises ServerLost, and what the start failed with."""
        if self._starting.cancelled():
            raise ServerLost("the instance was stopped before vLLM was ready")
        return self._starting.result()

    async def _by_native(
        self, sequence: NewSequence, call: EngineCall, kv: Sequence[KvSlice], entry: LayerEntry | None
    ) -> AsyncGenerator[TokenOutput, None]:
        self._sequences += 1
        self._native_idle.clear()
        try:
            async with aclosing(self._native.generate(sequence, call, kv, entry=entry)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._sequences -= 1
            if not self._sequences:
                self._native_idle.set()

    async def _run(self) -> None:
        """Wait for vLLM, end the native engine, and wait for vLLM's end; set `failure`."""
        native_closed = asyncio.create_task(self._native.wait_closed())
        try:
            await asyncio.wait([self._starting, native_closed], return_when=asyncio.FIRST_COMPLETED)
            if not self._starting.done():
                self.failure = self._native.failure
                return
            vllm = self._starting.result()
        except Exception as error:  # of the start: reported in `failure`
            self.failure = error
            return
        finally:
            native_closed.cancel()
        self._vllm = vllm
        self._on_vllm()
        idle, closed = (asyncio.ensure_future(one) for one in (self._native_idle.wait(), vllm.wait_closed()))
        try:
            await asyncio.wait([idle, closed], return_when=asyncio.FIRST_COMPLETED)
            if not closed.done():
                await self._native.aclose()
                await run_shielded(self._on_native_ended())
            await closed
        finally:
            idle.cancel()
            closed.cancel()
        self.failure = vllm.failure
