"""Work on a ready instance: requests of the channel in, replies out."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, nullcontext
from functools import partial

import numpy as np

from invoker.calls import Call, Calls
from invoker.engine.contract import EngineCall, EngineError, NewSequence, TokenOutput
from invoker.engine.kv_cache import KvShape
from invoker.engine.runner import EngineRunner
from invoker.errors import BadWork, NoSuchInstance
from invoker.handlers.running import HandlerOutput
from invoker.instance import Handler, Instance
from invoker.meter_accounts import Account
from invoker.stages.heads import Pipeline
from invoker.stages.kv_choice import PrefillRate
from invoker.stages.kv_moves import KvMoves
from registry.clock import Clock
from registry.live_messages import KvAt
from registry.messages import (
    Array,
    Arrays,
    Compute,
    Generate,
    HandlerChunk,
    InvokeHandler,
    Reply,
    TokenLogprob,
    Tokens,
    Usage,
)

MAX_BATCH_TOKENS = 64
_DTYPES = frozenset({"float32", "float16", "int64", "int32", "uint8"})


Run = Callable[[NewSequence, EngineCall], AsyncGenerator[TokenOutput, None]]
Aside = Callable[[str], KvAt | None]  # where the K and V lie that go by that name


def generate(
    instance: Instance, request: Generate, clock: Clock, calls: Calls, moves: KvMoves
) -> AsyncGenerator[Reply, None]:
    """Tokens as they come, those that are ready together in one message; then the usage."""
    runner = _runner(instance)
    run: Run = runner.generate
    if request.kv is not None and runner.kv_shape is not None:
        run = partial(_with_kv, runner, runner.kv_shape, instance.prefill, request.kv, moves)
    return _generate(run, instance.working(), instance.account, request, clock, calls)


def generate_by(
    pipeline: Pipeline, request: Generate, clock: Clock, calls: Calls
) -> AsyncGenerator[Reply, None]:
    """As `generate`, by a pipeline, of which the instance here is a part."""
    account = pipeline.instance.account
    return _generate(pipeline.running.generate, nullcontext(), account, request, clock, calls, pipeline.kv_at)


async def _with_kv(
    runner: EngineRunner,
    shape: KvShape,
    rate: PrefillRate,
    at: KvAt,
    moves: KvMoves,
    sequence: NewSequence,
    call: EngineCall,
) -> AsyncGenerator[TokenOutput, None]:
    """Generate what a pipeline has begun."""
    tokens = len(sequence.prompt_ids) + len(sequence.generated_ids)
    kv = await moves.bring(sequence.request_id, tokens, at, shape, rate)
    async with aclosing(runner.generate(sequence, call, kv)) as outputs:
        del kv  # the engine lets go of it when it has run
        async for output in outputs:
            yield output


def _nowhere(_: str) -> None:
    return None


async def _generate(
    run: Run,
    working: AbstractContextManager[None],
    account: Account,
    request: Generate,
    clock: Clock,
    calls: Calls,
    aside: Aside = _nowhere,
) -> AsyncGenerator[Reply, None]:
    sequence = NewSequence(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        generated_ids=request.generated_ids,
        sampling=request.sampling,
        flow=request.flow,
    )
    began_s, count = clock.monotonic_s(), 0
    with working, calls.begun(account, request.request_id) as call:
        outputs = run(sequence, call)
        async with aclosing(outputs), aclosing(batches(outputs)) as ready:
            async for batch in ready:
                if batch[-1].error:
                    raise EngineError(batch[-1].error)
                tokens = _tokens(batch, call.used_us, aside)
                if tokens is not None:
                    count += len(tokens.ids)
                    yield tokens
    yield _usage(call, clock.monotonic_s() - began_s, prompt=len(request.prompt_ids), completion=count)


async def compute(
    instance: Instance, request: Compute, clock: Clock, calls: Calls
) -> AsyncGenerator[Reply, None]:
    """One forward: its arrays, then the usage."""
    runner = _runner(instance)
    pixels = None if request.pixels is None else decode_array(request.pixels)
    began_s = clock.monotonic_s()
    with instance.working(), calls.begun(instance.account, request.request_id) as call:
        arrays = await runner.compute(
            request.kind, request.token_ids, pixels, request.pooling, request.normalize, call
        )
    took_s = clock.monotonic_s() - began_s
    counts = tuple(len(ids) for ids in request.token_ids)
    yield Arrays(arrays={name: encode_array(array) for name, array in arrays.items()}, token_counts=counts)
    yield _usage(call, took_s, prompt=sum(counts))


async def invoke_handler(
    instance: Instance, request: InvokeHandler, clock: Clock, calls: Calls
) -> AsyncGenerator[Reply, None]:
    """What the handler returns or yields; then the usage: it has the accelerator all the while, which
    calls that run side by side share. A handler that computes on when whoever asked has left has it still."""
    handler = _handler(instance)
    began_s = clock.monotonic_s()
    held = ExitStack()
    held.enter_context(instance.working())
    with calls.begun(instance.account, request.request_id) as call:
        held.enter_context(calls.working(call))
        outputs: AsyncIterator[HandlerOutput] = handler.invoke(
            request.request_id, request.body, request.timeout_s, held.close
        )
        try:
            async for output in outputs:
                yield HandlerChunk(data=output.data, stream=output.stream)
        finally:  # leaves the call, which cancels it if it is not over
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()
    total_us = round((clock.monotonic_s() - began_s) * 1e6)
    yield Usage(prompt_tokens=0, completion_tokens=0, gpu_us=call.used_us, queue_us=0, exec_us=total_us)


def _usage(call: Call, took_s: float, *, prompt: int, completion: int = 0) -> Usage:
    """What did not wait for its turn was executed."""
    queue_us = call.queued_us
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        gpu_us=call.used_us,
        queue_us=queue_us,
        exec_us=max(0, round(took_s * 1e6) - queue_us),
    )


async def batches(outputs: AsyncIterator[TokenOutput]) -> AsyncGenerator[list[TokenOutput], None]:
    """Group what is ready at once, without waiting for more: at most MAX_BATCH_TOKENS a group."""
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
                await asyncio.sleep(0)  # one turn of the loop: enough for an output that is queued
                if not waiting.done():
                    break
                output = waiting.result()
            if batch:
                yield batch
            if output is None:
                return
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.wait([waiting])


def encode_array(array: np.ndarray) -> Array:
    """An array as it crosses the channel."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return Array(dtype=array.dtype.name, shape=tuple(array.shape), data=little.tobytes())


def decode_array(array: Array) -> np.ndarray:
    """The array that came. Raises BadWork if its parts contradict each other."""
    if array.dtype not in _DTYPES:
        raise BadWork(
            f"arrays of {array.dtype[:20]!r} are not taken: use one of {', '.join(sorted(_DTYPES))}"
        )
    dtype = np.dtype(array.dtype).newbyteorder("<")
    try:
        return np.frombuffer(array.data, dtype).reshape(array.shape)
    except ValueError as error:
        raise BadWork(f"an array of {len(array.data)} bytes is not {array.dtype} {array.shape}") from error


async def _next(outputs: AsyncIterator[TokenOutput]) -> TokenOutput | None:
    """The next output, None at the end."""
    async for output in outputs:
        return output
    return None


def _runner(instance: Instance) -> EngineRunner:
    if instance.handler is not None:
        raise BadWork(f"{instance.request.function} is a handler: invoke it")
    if instance.runner is None:
        raise NoSuchInstance(f"instance {instance.id} is {instance.state}, not ready")
    return instance.runner


def _handler(instance: Instance) -> Handler:
    if instance.runner is not None:
        raise BadWork(f"{instance.request.function} is a model, not a handler")
    if instance.handler is None:
        raise NoSuchInstance(f"instance {instance.id} is {instance.state}, not ready")
    return instance.handler


def _tokens(batch: Sequence[TokenOutput], gpu_us: int, aside: Aside) -> Tokens | None:
    """The message for a batch; None if no token came of it (a part of a prompt was run)."""
    ids = tuple(output.token_id for output in batch if output.token_id is not None)
    finish_reason = batch[-1].finish_reason
    if not ids and not finish_reason:
        return None
    logprobs: tuple[TokenLogprob, ...] = tuple(
        output.logprob for output in batch if output.logprob is not None
    )
    kv = aside(batch[-1].aside) if batch[-1].aside else None
    return Tokens(ids=ids, logprobs=logprobs, finish_reason=finish_reason, gpu_us=gpu_us, kv=kv)
