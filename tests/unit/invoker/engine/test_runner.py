"""The runner: streams, cancellation, failures and closing, over a fake engine and a real one."""

import asyncio
import threading
import weakref
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np
import pytest
import torch

from invoker.engine.contract import EngineError, NewSequence, OutOfKvCache, TokenOutput
from invoker.engine.kv.entry import LayerEntry
from invoker.engine.kv.export import ExportKv, KvExport
from invoker.engine.kv.slices import KvSlice
from invoker.engine.runner import UNBILLED, EngineClosed, EngineRunner
from registry.messages.live import MOVED
from tests.fixtures.engine import make_decoder, run_all, sequence
from tests.fixtures.fake_engine import FakeComputeEngine, FakeEngine, StepGate, continuation


async def _tokens(runner: EngineRunner, request: NewSequence) -> list[int]:
    async with aclosing(runner.generate(request)) as outputs:
        return [output.token_id async for output in outputs if output.token_id is not None]


async def test_concurrent_streams_get_their_own_tokens() -> None:
    engine = FakeEngine()
    runner = EngineRunner(engine)
    requests = [sequence(str(i), [i, 1, 2], max_tokens=5 + i) for i in range(8)]
    found = await asyncio.gather(*(_tokens(runner, request) for request in requests))
    assert found == [continuation([i, 1, 2], 5 + i) for i in range(8)]
    assert repr(runner) == "<EngineRunner open, 0 streams, 0 calls>"
    await runner.aclose()
    await runner.aclose()
    assert engine.closed
    assert repr(runner) == "<EngineRunner closed, 0 streams, 0 calls>"


async def test_a_real_engine_behind_the_runner() -> None:
    requests = [sequence(str(i), [i + 1, 2, 3], max_tokens=6) for i in range(4)]
    expected = run_all(make_decoder("llama"), requests)

    runner = EngineRunner(make_decoder("llama"))
    found = await asyncio.gather(*(_tokens(runner, request) for request in requests))
    assert found == [expected[request.request_id] for request in requests]
    await runner.aclose()


async def test_imported_k_and_v_are_released_once_the_engine_has_them() -> None:
    class Taking(FakeEngine):
        def add(
            self, sequence: NewSequence, kv: Sequence[KvSlice] = (), entry: LayerEntry | None = None
        ) -> None:
            assert kv and entry is None
            super().add(sequence)

    runner = EngineRunner(Taking())
    data = torch.zeros(1, 2, 3, 4)
    kept = weakref.ref(data)
    slices = (KvSlice(first=0, last=1, data=data),)
    async with aclosing(runner.generate(sequence("r", [1, 2, 3], max_tokens=4), UNBILLED, slices)) as outputs:
        del data, slices
        await anext(outputs)
        assert kept() is None
    await runner.aclose()


async def _outputs(
    runner: EngineRunner,
    request: NewSequence,
    kv: Sequence[KvSlice] = (),
    export: ExportKv | None = None,
) -> list[TokenOutput]:
    async with aclosing(runner.generate(request, UNBILLED, kv, export)) as outputs:
        return [output async for output in outputs if output.token_id is not None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
async def test_a_sequence_handed_off_after_its_first_token_continues_the_same(
    kind: str, temperature: float
) -> None:
    prompt = list(range(1, 60))
    sampling = {"max_tokens": 12, "temperature": temperature, "seed": 7}
    request = sequence("r", prompt, **sampling)
    (expected,) = run_all(make_decoder(kind), [request]).values()
    prefill, decode = EngineRunner(make_decoder(kind)), EngineRunner(make_decoder(kind))
    exported: dict[str, KvExport] = {}
    (last,) = await _outputs(prefill, request, export=exported.__setitem__)
    assert (last.token_id, last.finish_reason, last.exported_kv) == (expected[0], MOVED, "r")
    kv = exported["r"].wait(0.0)
    assert kv.tokens == len(prompt) and prefill.kv_tokens[0] == 0
    moved = sequence("r", prompt, expected[:1], **sampling)
    continued = await _outputs(decode, moved, [kv])
    assert [output.token_id for output in continued] == expected[1:]
    assert continued[0].work == 1, "its prompt was not run again"
    for runner in (prefill, decode):
        await runner.aclose()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
async def test_a_sequence_that_leaves_while_it_decodes_continues_the_same(
    kind: str, temperature: float
) -> None:
    prompt = list(range(1, 60))
    sampling = {"max_tokens": 200, "temperature": temperature, "seed": 7}
    request = sequence("r", prompt, **sampling)
    (expected,) = run_all(make_decoder(kind), [request]).values()
    before, after = EngineRunner(make_decoder(kind)), EngineRunner(make_decoder(kind))
    exported: dict[str, KvExport] = {}
    async with aclosing(before.generate(request)) as outputs:
        tokens: list[int] = []
        async for output in outputs:
            tokens += [] if output.token_id is None else [output.token_id]
            if len(tokens) == 5:
                await before.hand_off("r", exported.__setitem__)
    assert (output.token_id, output.finish_reason, output.exported_kv) == (None, MOVED, "r")
    kv = exported["r"].wait(0.0)
    assert len(tokens) < 200 and tokens == expected[: len(tokens)] and before.kv_tokens[0] == 0
    assert kv.tokens == len(prompt) + len(tokens) - 1, "nothing has followed the last token yet"
    continued = await _outputs(after, sequence("r", prompt, expected[: len(tokens)], **sampling), [kv])
    assert [output.token_id for output in continued] == expected[len(tokens) :]
    assert continued[0].work == 1, "nothing was computed again"
    for runner in (before, after):
        await runner.aclose()


async def test_a_sequence_that_cannot_be_exported_leaves_without() -> None:
    class Unable(FakeEngine):
        def export_kv(self, request_id: str) -> object:
            raise MemoryError("no memory for a copy")

    runner = EngineRunner(Unable())
    async with aclosing(runner.generate(sequence("r", [1, 2], max_tokens=1 << 20))) as outputs:
        await anext(outputs)
        await runner.hand_off("r", lambda name, kv: None)
        last = [output async for output in outputs][-1]
    assert (last.finish_reason, last.exported_kv) == (MOVED, "")
    await runner.aclose()


async def test_unknown_sequences_and_a_closed_engine_are_left_at_once() -> None:
    runner, exported = EngineRunner(make_decoder("llama")), dict[str, KvExport]()
    await runner.hand_off("r", exported.__setitem__)
    await runner.aclose()
    await runner.hand_off("r", exported.__setitem__)
    assert not exported


async def test_k_and_v_are_exported_before_the_prompt_has_run() -> None:
    runner, exported = EngineRunner(make_decoder("llama", prefill_budget=16)), dict[str, KvExport]()
    request = sequence("r", list(range(1, 60)), max_tokens=4)
    async with aclosing(runner.generate(request, UNBILLED, (), exported.__setitem__)) as outputs:
        first = await anext(outputs)
        assert (first.token_id, first.finish_reason, first.exported_kv) == (None, "", "r")
        assert exported["r"].tokens == 59
        rest = [output async for output in outputs]
    assert [output.token_id is None for output in rest] == [True, True, True, False]
    assert rest[-1].exported_kv == "r"
    await runner.aclose()


async def test_a_sequence_that_ends_with_its_first_token_is_not_handed_off() -> None:
    runner = EngineRunner(make_decoder("llama"))
    exported: dict[str, KvExport] = {}
    (last,) = await _outputs(runner, sequence("r", [1, 2], max_tokens=1), export=exported.__setitem__)
    assert last.finish_reason == "length" and not exported
    await runner.aclose()


async def test_a_sequence_whose_k_and_v_cannot_be_exported_is_handed_off_without() -> None:
    class Unable(FakeEngine):
        def export(self, request_id: str, started: object) -> None:
            return None

        def finish_export(self, request_id: str) -> None:
            raise MemoryError("no memory for a copy")

    runner = EngineRunner(Unable())
    (last,) = await _outputs(runner, sequence("r", [1, 2], max_tokens=4), export=lambda name, kv: None)
    assert (last.finish_reason, last.exported_kv) == (MOVED, "")
    again = await _outputs(runner, sequence("r", [1, 2], max_tokens=4))
    assert len(again) == 4
    await runner.aclose()


async def test_a_stream_that_is_closed_frees_its_sequence_before_the_next_step() -> None:
    gate = StepGate()
    engine = FakeEngine(gate=gate)
    runner = EngineRunner(engine)
    kept = asyncio.create_task(_tokens(runner, sequence("kept", [1], max_tokens=4)))
    gate.release()
    async with aclosing(runner.generate(sequence("left", [2]))) as outputs:
        gate.release()
        await anext(outputs)
    # The name is available again, and the first stream's outputs do not reach the second.
    again = asyncio.create_task(_tokens(runner, sequence("left", [3], max_tokens=3)))
    gate.open()
    assert await again == continuation([3], 3)
    assert await kept == continuation([1], 4)
    assert engine.sequences == 0
    await runner.aclose()


async def test_a_cancelled_task_frees_its_sequence() -> None:
    gate = StepGate()
    engine = FakeEngine(gate=gate)
    runner = EngineRunner(engine)
    task = asyncio.create_task(_tokens(runner, sequence("a", [1], max_tokens=1000)))
    gate.release(3)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert repr(runner) == "<EngineRunner open, 0 streams, 0 calls>"
    gate.open()
    assert await _tokens(runner, sequence("b", [2], max_tokens=2)) == continuation([2], 2)
    assert engine.sequences == 0
    await runner.aclose()


async def test_a_refused_sequence_raises_what_add_raises() -> None:
    gate = StepGate()
    runner = EngineRunner(FakeEngine(max_sequence_tokens=8, gate=gate))
    with pytest.raises(OutOfKvCache):
        await _tokens(runner, sequence("a", [1] * 8))
    first = asyncio.create_task(_tokens(runner, sequence("a", [1], max_tokens=2)))
    await asyncio.sleep(0)
    second = asyncio.create_task(_tokens(runner, sequence("a", [1], max_tokens=2)))
    gate.open()
    results = await asyncio.gather(first, second, return_exceptions=True)
    # Either the first had finished already when the second came, or the second was refused.
    assert results[0] == continuation([1], 2)
    assert results[1] == results[0] or isinstance(results[1], EngineError)
    await runner.aclose()


async def test_an_engine_that_raises_ends_its_streams_and_closes() -> None:
    engine = FakeEngine()
    engine.fail_next(ZeroDivisionError("a bug"))
    runner = EngineRunner(engine)
    results = await asyncio.gather(
        *(_tokens(runner, sequence(str(i), [1])) for i in range(3)), return_exceptions=True
    )
    assert all(isinstance(r, EngineClosed) and "a bug" in str(r) for r in results)
    await runner.wait_closed()
    assert isinstance(runner.failure, ZeroDivisionError) and engine.closed
    with pytest.raises(EngineClosed, match="a bug"):
        await _tokens(runner, sequence("b", [1]))
    assert repr(runner) == "<EngineRunner failed, 0 streams, 0 calls>"
    await runner.aclose()


class _UnclosableEngine(FakeEngine):
    def close(self) -> None:
        raise AssertionError("inconsistent after the failure")


@pytest.mark.parametrize("fails_first", [True, False])
async def test_an_engine_that_cannot_be_closed_still_ends(fails_first: bool) -> None:
    engine = _UnclosableEngine(gate=StepGate())
    if fails_first:
        engine.fail_next(ZeroDivisionError("a bug"))
    runner = EngineRunner(engine)
    stream = asyncio.create_task(_tokens(runner, sequence("a", [1])))
    await asyncio.sleep(0)
    assert repr(runner) == "<EngineRunner open, 1 streams, 0 calls>"
    await runner.aclose()
    with pytest.raises(EngineClosed):
        await stream
    assert runner.failure is not None


class _OneErrorEngine(FakeEngine):
    """An engine whose step fails for one sequence only."""

    def step(self) -> list[TokenOutput]:
        outputs = super().step()
        if any(o.request_id == "bad" for o in outputs):
            self.cancel("bad")
        return [
            TokenOutput(
                request_id="bad", token_id=None, logprob=None, finish_reason="", work=1, error="broken"
            )
            if o.request_id == "bad"
            else o
            for o in outputs
        ]


async def test_an_error_output_ends_its_stream_only() -> None:
    runner = EngineRunner(_OneErrorEngine())

    async def errors() -> list[str]:
        async with aclosing(runner.generate(sequence("bad", [1]))) as outputs:
            return [output.error async for output in outputs]

    good, bad = await asyncio.gather(_tokens(runner, sequence("good", [1], max_tokens=4)), errors())
    assert good == continuation([1], 4)
    assert bad == ["broken"]
    await runner.aclose()


async def test_closing_ends_streams_under_way() -> None:
    gate = StepGate()
    runner = EngineRunner(FakeEngine(gate=gate))
    task = asyncio.create_task(_tokens(runner, sequence("a", [1], max_tokens=10_000)))
    await asyncio.sleep(0)
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    gate.open()
    with pytest.raises(EngineClosed, match="closed"):
        await task
    await closing
    with pytest.raises(EngineClosed):
        await runner.compute("embed", [[1]])


async def test_compute_goes_one_at_a_time_in_order() -> None:
    class Engine(FakeComputeEngine):
        def __init__(self) -> None:
            super().__init__()
            self.threads: set[int] = set()
            self.order: list[int] = []

        def compute(self, kind, token_ids, pixels, pooling, normalize):  # type: ignore[no-untyped-def]
            self.threads.add(threading.get_ident())
            self.order.append(token_ids[0][0])
            if kind == "broken":
                raise RuntimeError("no such kernel")
            return super().compute(kind, token_ids, pixels, pooling, normalize)

    engine = Engine()
    runner = EngineRunner(engine)
    results = await asyncio.gather(*(runner.compute("embed", [[i, 1]]) for i in range(5)))
    assert [float(r["embeddings"][0, 0]) for r in results] == [1, 2, 3, 4, 5]
    assert engine.order == list(range(5)) and len(engine.threads) == 1
    with pytest.raises(EngineError, match="no such kernel"):
        await runner.compute("broken", [[9]])
    pixels = np.ones((2, 3, 2, 2), dtype=np.float32)
    assert (await runner.compute("classify", [[0]], pixels))["logits"].tolist() == [[12.0], [12.0]]
    with pytest.raises(EngineError, match="does not generate"):
        await _tokens(runner, sequence("a", [1]))
    await runner.aclose()
    assert engine.closed


def test_the_fake_engine_keeps_the_contract() -> None:
    engine = FakeEngine(max_sequence_tokens=6)
    whole = continuation([4, 5], 4)
    engine.add(sequence("a", [4, 5], whole[:2], max_tokens=100))
    engine.add(sequence("b", [4, 5], stop_token_ids=(whole[0],), logprobs=1))
    outputs = engine.step()
    assert [(o.token_id, o.finish_reason) for o in outputs] == [(whole[2], ""), (whole[0], "stop")]
    assert [o.work for o in outputs] == [1, 1]
    assert outputs[0].logprob is None and outputs[1].logprob is not None
    assert [(o.token_id, o.finish_reason) for o in engine.step()] == [(whole[3], "length")]
    assert engine.step() == [] and engine.steps == 2 and repr(engine) == "<FakeEngine [] after 2 steps>"
