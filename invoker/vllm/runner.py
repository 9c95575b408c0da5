"""One instance's vLLM server as an engine: sequences by token ids, and requests that pass through it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import msgspec

from invoker.engine.contract import EngineCall, EngineError, NewSequence, StepMeter, TokenOutput
from invoker.engine.engine_load import EngineLoad
from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.entry import EntryFormat, LayerEntry
from invoker.engine.kv.slices import KvSlice
from invoker.vllm.client import ServerLost, read_body
from invoker.vllm.events import BadAnswer, ForwardedStream, TokenUsage, prepare_request, usage_of
from invoker.vllm.intervals import TokenIntervals
from invoker.vllm.server import VllmServer
from rdmacast.aio.shielded import run_shielded
from registry.messages.forward import ForwardedChunk, ForwardedHead, ForwardRequest


class VllmRunner:
    """The counterpart of EngineRunner for a vLLM server. Belongs to the event loop's thread.

    If the server ends, all its calls end with ServerLost and the runner closes itself: see `failure`.
    """

    kv_shape: KvShape | None = None
    entry_format: EntryFormat | None = None
    kv_tokens = (0, 0)
    load: EngineLoad | None = None  # its steps are not seen, so that the number of calls has to do

    def __init__(self, server: VllmServer, meter: StepMeter) -> None:
        self._server = server
        self._intervals = TokenIntervals(meter)
        self.failure: Exception | None = None

    def __repr__(self) -> str:
        return f"<VllmRunner {self._server!r} {self._intervals!r}>"

    async def generate(
        self,
        sequence: NewSequence,
        call: EngineCall,
        kv: Sequence[KvSlice] = (),
        *,
        entry: LayerEntry | None = None,
    ) -> AsyncGenerator[TokenOutput, None]:
        """Yield a sequence's outputs up to the one with a `finish_reason`.

        `kv` and `entry` are ignored. Raises ServerLost, ServerRefused.
        """
        prompt = len(sequence.prompt_ids) + len(sequence.generated_ids)
        async with self._metered(call):
            async for outputs in self._translated(self._server.client.generate(sequence)):
                self._intervals.add(call, prompt + len(outputs))
                prompt = 0
                for output in outputs[:-1]:
                    yield output
                last = outputs[-1]
                if not last.finish_reason:
                    yield last
        yield last

    async def forward(
        self, request: ForwardRequest, call: EngineCall
    ) -> AsyncGenerator[ForwardedHead | ForwardedChunk, None]:
        """Pass a request through; yield the head, then the whole body, or the events of a stream.

        Raises ServerLost, ServerRefused for an error within a stream, ValueError for a body that is no JSON
        object.
        """
        prepared = prepare_request(request.body, request.request_id)
        stream = ForwardedStream(wants_usage=prepared.wants_usage, wants_each=prepared.wants_each)
        try:
            async with (
                self._metered(call, counts=prepared.streams),
                self._server.client.post(request.path, prepared.body, request.trace) as response,
            ):
                content_type = response.headers.get("content-type", "application/json")
                head = ForwardedHead(status=response.status_code, content_type=content_type)
                yield head
                if head.is_stream:
                    before = TokenUsage()
                    async for data in response.aiter_bytes():
                        for event in stream.feed(data):
                            yield _chunk(event, stream.usage)
                        self._intervals.add(call, _difference(before, stream.usage))
                        before = stream.usage
                    if not stream.is_over:
                        raise ServerLost("vLLM's server ended a stream early")
                    last = _chunk(b"", stream.usage, last=True)
                else:
                    data = await read_body(response)
                    found = usage_of(_decoded(data)) if response.status_code == 200 else None
                    last = _chunk(data, found or TokenUsage(), last=True)
        except BadAnswer as error:
            raise EngineError(f"vLLM's server answered with {error}") from error
        yield last

    async def wait_closed(self) -> None:
        """Return once the server has ended, on request or by a failure, or takes no connections."""
        server = self._server
        waits = [asyncio.ensure_future(one.wait()) for one in (server.ended, server.client.unreachable)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        reason = server.reason if server.ended.is_set() else "vLLM's server takes no connections"
        self.failure = self.failure or ServerLost(reason)

    async def aclose(self) -> None:
        """End the server with all its calls. Idempotent."""
        await self._server.aclose()
        await run_shielded(self._intervals.aclose())

    @asynccontextmanager
    async def _metered(self, call: EngineCall, *, counts: bool = True) -> AsyncGenerator[None, None]:
        self._intervals.enter(call, counts=counts)
        try:
            yield
        finally:
            await run_shielded(self._intervals.leave(call))

    async def _translated(
        self, outputs: AsyncGenerator[list[TokenOutput], None]
    ) -> AsyncGenerator[list[TokenOutput], None]:
        try:
            async for one in outputs:
                yield one
        except BadAnswer as error:
            raise EngineError(f"vLLM's server answered with {error}") from error
        finally:
            await outputs.aclose()


def _chunk(data: bytes, usage: TokenUsage, *, last: bool = False) -> ForwardedChunk:
    return ForwardedChunk(
        data=data, last=last, prompt_tokens=usage.prompt, completion_tokens=usage.completion
    )


def _decoded(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise BadAnswer(f"a body that is not JSON: {error}") from error


def _difference(before: TokenUsage, now: TokenUsage) -> int:
    return max(0, now.prompt + now.completion - before.prompt - before.completion)
