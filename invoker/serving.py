"""Runs requests on ready instances and yields their replies."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial

import msgspec
import numpy as np

from invoker.base.errors import InvalidWork, NoSuchInstance
from invoker.engine.contract import EngineCall, EngineError, NewSequence, TokenOutput
from invoker.engine.kv.cache import KvShape
from invoker.engine.kv.slices import KvSlice
from invoker.engine.runner import EngineRunner
from invoker.handlers.running import HandlerOutput
from invoker.instances.calls import Calls, HeldCall
from invoker.instances.instance import Forwarder, Handler, Instance, ModelRunner
from invoker.kv.choice import PrefillRate
from invoker.kv.transfer import KvConnector
from invoker.live.pipelines import HostedPipeline
from invoker.metering.accounts import MeterAccount
from rdmacast.aio.groups import cancel_and_wait
from registry.clock import Clock
from registry.messages.forward import ForwardedChunk, ForwardRequest
from registry.messages.live import KvLocation, LeaveInstance, PrefetchKv
from registry.messages.node import (
    Acknowledged,
    Array,
    Arrays,
    Compute,
    Generate,
    HandlerChunk,
    InvokeHandler,
    Reply,
    RequestUsage,
    Tokens,
)
from registry.messages.sampling import TokenLogprob

MAX_BATCH_TOKENS = 64
_DTYPES = frozenset({"float32", "float16", "int64", "int32", "uint8"})


GenerateTokens = Callable[[NewSequence, EngineCall], AsyncGenerator[TokenOutput, None]]
ContinueTokens = Callable[[NewSequence, EngineCall, Sequence[KvSlice]], AsyncGenerator[TokenOutput, None]]
LocateKv = Callable[[str], KvLocation | None]  # the location of exported K and V, by their name


def generate(
    instance: Instance, request: Generate, clock: Clock, calls: Calls, connector: KvConnector
) -> AsyncGenerator[Reply, None]:
    """Yield generated tokens, those available together in one message, then the usage."""
    runner = _runner(instance)
    shape, run, locate = runner.kv_shape, runner.generate, _nowhere
    if shape is not None and isinstance(runner, EngineRunner):
        locate = partial(connector.location, instance.id, shape.layers)
        if request.hand_off:
            run = partial(runner.generate, export=connector.exporter(instance.id))
    if request.kv is not None and shape is not None:
        if runner.load is not None and (seen := runner.load.reading(clock.monotonic_s()).prefill_tokens_s):
            instance.prefill.record(round(seen), shape.layers, 1.0)
        run = partial(_with_kv, run, shape, instance.prefill, request.kv, connector)
    return _generate(run, instance.working(), instance.account, request, clock, calls, locate)


def _nowhere(_: str) -> KvLocation | None:
    return None


def generate_by(
    pipeline: HostedPipeline, request: Generate, clock: Clock, calls: Calls
) -> AsyncGenerator[Reply, None]:
    """Yield tokens as `generate` does, from a pipeline that contains this node's instance."""
    account = pipeline.instance.account
    return _generate(
        pipeline.running.generate, nullcontext(), account, request, clock, calls, pipeline.kv_location
    )


async def _with_kv(
    run: ContinueTokens,
    shape: KvShape,
    rate: PrefillRate,
    at: KvLocation,
    connector: KvConnector,
    sequence: NewSequence,
    call: EngineCall,
) -> AsyncGenerator[TokenOutput, None]:
    """Continue a request that has moved here."""
    tokens = len(sequence.prompt_ids) + len(sequence.generated_ids)
    kv = await connector.load(sequence.request_id, tokens, at, shape, rate)
    async with aclosing(run(sequence, call, kv)) as outputs:
        del kv  # freed once the engine has copied it
        async for output in outputs:
            yield output


async def _generate(
    run: GenerateTokens,
    working: AbstractContextManager[None],
    account: MeterAccount,
    request: Generate,
    clock: Clock,
    calls: Calls,
    locate_kv: LocateKv,
) -> AsyncGenerator[Reply, None]:
    sequence = NewSequence(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        generated_ids=request.generated_ids,
        sampling=request.sampling,
        tenant=request.tenant,
        trace=request.trace,
    )
    started_s, count = clock.monotonic_s(), 0
    with working, calls.open(account, request.request_id) as call:
        outputs = run(sequence, call)
        async with aclosing(outputs), aclosing(batches(outputs)) as ready:
            async for batch in ready:
                if batch[-1].error:
                    raise EngineError(batch[-1].error)
                tokens = _tokens(batch, call.used_us, locate_kv)
                if tokens is not None:
                    count += len(tokens.ids)
                    yield tokens
    yield _usage(call, clock.monotonic_s() - started_s, prompt=len(request.prompt_ids), completion=count)


async def leave_instance(
    instance: Instance, request: LeaveInstance, connector: KvConnector
) -> AsyncGenerator[Reply, None]:
    """End calls that are to continue on other instances, if the engine is a native one."""
    if isinstance(instance.runner, EngineRunner) and instance.runner.kv_shape is not None:
        export = connector.exporter(instance.id)
        for request_id in request.request_ids:
            await instance.runner.hand_off(request_id, export)
    yield Acknowledged()


async def prefetch_kv(
    instance: Instance, request: PrefetchKv, connector: KvConnector
) -> AsyncGenerator[Reply, None]:
    """Begin to fetch the K and V of a sequence that the instance is to continue."""
    shape = _runner(instance).kv_shape
    if shape is not None:
        connector.prefetch(request.kv, request.tokens, shape)
    yield Acknowledged()


async def compute(
    instance: Instance, request: Compute, clock: Clock, calls: Calls
) -> AsyncGenerator[Reply, None]:
    """Yield the arrays of one forward pass, then the usage."""
    runner = _runner(instance)
    if not isinstance(runner, EngineRunner):
        raise InvalidWork(f"{instance.request.function} generates; it computes nothing else")
    pixels = None if request.pixels is None else decode_array(request.pixels)
    started_s = clock.monotonic_s()
    with instance.working(), calls.open(instance.account, request.request_id) as call:
        arrays = await runner.compute(
            request.kind, request.token_ids, pixels, request.pooling, request.normalize, call
        )
    took_s = clock.monotonic_s() - started_s
    yield Arrays(arrays={name: encode_array(array) for name, array in arrays.items()})
    yield _usage(call, took_s, prompt=sum(map(len, request.token_ids)))


async def invoke_handler(
    instance: Instance, request: InvokeHandler, clock: Clock, calls: Calls
) -> AsyncGenerator[Reply, None]:
    """Yield what the handler returns, with the usage, or what it yields, then the usage.

    The call is charged for the accelerator until the handler has really ended, shared with concurrent calls.
    """
    handler = _handler(instance)
    started_s = clock.monotonic_s()
    instance.begin_work()
    with calls.open(instance.account, request.request_id) as call:
        calls.occupy(call)
        ended = False

        def on_ended() -> None:
            nonlocal ended
            if not ended:
                ended = True
                calls.vacate(call)
                instance.end_work()

        outputs: AsyncIterator[HandlerOutput] = handler.invoke(
            request.request_id, request.body, request.timeout_s, on_ended
        )
        returned: bytes | None = None
        try:
            async for output in outputs:
                if output.stream:
                    yield HandlerChunk(data=output.data, stream=True)
                else:
                    returned = output.data
        finally:  # cancels the call if it has not ended
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()
    total_us = round((clock.monotonic_s() - started_s) * 1e6)
    usage = RequestUsage(prompt_tokens=0, completion_tokens=0, gpu_us=call.used_us, exec_us=total_us)
    yield usage if returned is None else HandlerChunk(data=returned, usage=usage)


async def forward(
    instance: Instance, request: ForwardRequest, clock: Clock, calls: Calls
) -> AsyncGenerator[Reply, None]:
    """Yield what the engine's own server answers, then the usage."""
    runner = _runner(instance)
    if not isinstance(runner, Forwarder):
        raise InvalidWork(f"{instance.request.function} has no server of its own")
    started_s, last = clock.monotonic_s(), ForwardedChunk()
    with instance.working(), calls.open(instance.account, request.request_id) as call:
        answer = runner.forward(request, call)
        async with aclosing(answer):
            async for reply in answer:
                if isinstance(reply, ForwardedChunk):
                    reply = last = msgspec.structs.replace(reply, gpu_us=call.used_us)
                yield reply
    took_s = clock.monotonic_s() - started_s
    yield _usage(call, took_s, prompt=last.prompt_tokens, completion=last.completion_tokens)


def _usage(call: HeldCall, took_s: float, *, prompt: int, completion: int = 0) -> RequestUsage:
    """Return the usage; time not spent in the queue counts as execution."""
    return RequestUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        gpu_us=call.used_us,
        exec_us=max(0, round(took_s * 1e6) - call.queued_us),
    )


async def batches(outputs: AsyncIterator[TokenOutput]) -> AsyncGenerator[list[TokenOutput], None]:
    """Group outputs that are available together, without waiting for more, at most MAX_BATCH_TOKENS."""
    waiting: asyncio.Task[TokenOutput | None] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(_next(outputs))
            output = await waiting
            batch: list[TokenOutput] = []
            while output is not None:
                batch.append(output)
                waiting = None
                if len(batch) == MAX_BATCH_TOKENS:
                    break
                waiting = asyncio.ensure_future(_next(outputs))
                await asyncio.sleep(0)  # one loop iteration: enough for a queued output
                if not waiting.done():
                    break
                output = waiting.result()
            if batch:
                yield batch
            if output is None:
                return
    finally:
        if waiting is not None:
            await cancel_and_wait(waiting)


def encode_array(array: np.ndarray) -> Array:
    """Encode an array for the channel."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return Array(dtype=array.dtype.name, shape=tuple(array.shape), data=little.tobytes())


def decode_array(array: Array) -> np.ndarray:
    """Decode an array from the channel. Raises InvalidWork if size, shape and dtype do not match."""
    if array.dtype not in _DTYPES:
        raise InvalidWork(
            f"dtype {array.dtype[:20]!r} is not supported: use one of {', '.join(sorted(_DTYPES))}"
        )
    dtype = np.dtype(array.dtype).newbyteorder("<")
    try:
        return np.frombuffer(array.data, dtype).reshape(array.shape)
    except ValueError as error:
        raise InvalidWork(
            f"an array of {len(array.data)} bytes is not {array.dtype} {array.shape}"
        ) from error


async def _next(outputs: AsyncIterator[TokenOutput]) -> TokenOutput | None:
    """Return the next output, None at the end."""
    async for output in outputs:
        return output
    return None


def _runner(instance: Instance) -> ModelRunner:
    if instance.handler is not None:
        raise InvalidWork(f"{instance.request.function} is a handler: call its invoke endpoint")
    if instance.runner is None:
        raise NoSuchInstance(f"instance {instance.id} is {instance.state}, not ready")
    return instance.runner


def _handler(instance: Instance) -> Handler:
    if instance.runner is not None:
        raise InvalidWork(f"{instance.request.function} is a model, not a handler")
    if instance.handler is None:
        raise NoSuchInstance(f"instance {instance.id} is {instance.state}, not ready")
    return instance.handler


def _tokens(batch: Sequence[TokenOutput], gpu_us: int, locate_kv: LocateKv) -> Tokens | None:
    """Return the message for a batch; None if it says nothing (part of a prompt was run)."""
    ids = tuple(output.token_id for output in batch if output.token_id is not None)
    finish_reason = batch[-1].finish_reason
    exported = next((output.exported_kv for output in batch if output.exported_kv), "")
    if finish_reason:
        exported = batch[-1].exported_kv
    elif not ids and not exported:
        return None
    logprobs: tuple[TokenLogprob, ...] = tuple(
        output.logprob for output in batch if output.logprob is not None
    )
    kv = locate_kv(exported) if exported else None
    return Tokens(ids=ids, logprobs=logprobs, finish_reason=finish_reason, gpu_us=gpu_us, kv=kv)
