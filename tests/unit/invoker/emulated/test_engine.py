"""The emulated engine: times of the profile, real queues, tokens that follow from all before."""

import threading

import pytest
import torch

from benchmarks.scaleout.profiles import find_profile
from invoker.emulated.device_clock import DeviceClock, Lateness, WorkQueue
from invoker.emulated.engine import EmulatedEngine
from invoker.emulated.kv import kv_shape, rows_of, slice_of
from invoker.emulated.profiles import StepLoad
from invoker.emulated.tokens import continuation
from invoker.engine.contract import NewSequence, OutOfKvCache
from invoker.engine.kv.entry import LayerEntry
from invoker.engine.kv.export import KvExport, KvRange
from invoker.engine.scheduling.sequence_table import InvalidSequence
from registry.messages.sampling import Sampling
from tests.fixtures.emulated import SleepTime

PROFILE = find_profile("h800-llama2-7b/10000")
VOCABULARY = PROFILE.model.vocabulary
PAGE_BYTES = kv_shape(PROFILE, 32).page_bytes


def make(
    time: SleepTime, pages: int = 100, context: int = 1024, sequences: int = 64, slower: int = 1
) -> EmulatedEngine:
    return EmulatedEngine(
        PROFILE, time.clock(slower), pages * PAGE_BYTES, context_length=context, max_sequences=sequences
    )


def ask(name: str, prompt: list[int], generated: list[int] | None = None, **sampling: object) -> NewSequence:
    given = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return NewSequence(
        request_id=name,
        prompt_ids=prompt,
        generated_ids=generated or [],
        sampling=Sampling(**given),  # type: ignore[arg-type]
    )


def run(engine: EmulatedEngine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            if output.token_id is not None:
                tokens.setdefault(output.request_id, []).append(output.token_id)
        engine.check_integrity()
    return tokens


def test_a_step_takes_what_the_profile_says() -> None:
    time = SleepTime()
    engine = make(time)
    engine.add(ask("a", [20] * 512, max_tokens=3))
    assert run(engine) == {
        "a": continuation([20] * 512, 3, VOCABULARY, Sampling(max_tokens=3, temperature=0))
    }
    prefill_s = PROFILE.step_s(StepLoad(tokens=512, sequences=1))
    decode_s = [PROFILE.step_s(StepLoad(tokens=1, sequences=1, context=512 + more)) for more in range(2)]
    assert time.slept == pytest.approx([prefill_s, *decode_s])


def test_slower_devices_take_longer_for_the_same() -> None:
    usual, slow = SleepTime(), SleepTime()
    for time, slower in ((usual, 1), (slow, 10)):
        engine = make(time, slower=slower)
        engine.add(ask("a", [20] * 600))
        run(engine)
    assert slow.slept == pytest.approx([10 * one for one in usual.slept])


def test_chunks_of_a_prompt_need_no_head_and_sequences_share_steps() -> None:
    time = SleepTime()
    engine = make(time, sequences=8)
    for name in "abcd":
        engine.add(ask(name, list(range(20, 320))))
    tokens = run(engine)
    assert len({tuple(found) for found in tokens.values()}) == 1 and len(tokens) == 4
    # 1,200 tokens of prompts by at most 512, then decoding beside each other.
    assert 3 + 7 <= len(time.slept) <= 16
    time.slept.clear()
    engine.add(ask("e", [20] * 700))
    run(engine)
    assert time.slept[0] == pytest.approx(32 * PROFILE.layer_s(StepLoad(tokens=512, sequences=1)))


def test_a_sequence_continues_elsewhere_with_the_same_tokens() -> None:
    for sampling in ({}, {"temperature": 0.8, "seed": 5}):
        expected = run_one(ask("a", [21, 22, 23], max_tokens=20, **sampling))
        for cut in (1, 7, 19):
            later = ask("a", [21, 22, 23], expected[:cut], max_tokens=20, **sampling)
            assert run_one(later) == expected[cut:]
    assert run_one(ask("a", [21, 22], temperature=1.0, seed=1)) != run_one(
        ask("a", [21, 22], temperature=1.0, seed=2)
    )
    assert all(16 <= token < VOCABULARY for token in expected)


def run_one(sequence: NewSequence) -> list[int]:
    engine = make(SleepTime())
    engine.add(sequence)
    return run(engine)[sequence.request_id]


def test_any_other_context_gives_other_tokens() -> None:
    expected = run_one(ask("a", [21, 22, 23, 24]))
    for other in ([21, 22, 24, 23], [21, 22, 23], [21, 22, 23, 24, 24], [20, 22, 23, 24]):
        assert run_one(ask("a", other)) != expected


def test_the_kv_cache_is_bounded() -> None:
    engine = make(SleepTime(), pages=4)
    assert engine.max_sequence_tokens == 64
    with pytest.raises(OutOfKvCache):
        engine.add(ask("long", [20] * 64))
    alone = {name: run_one(ask(name, [20 + at] * 30, max_tokens=20)) for at, name in enumerate("abc")}
    for at, name in enumerate("abc"):
        engine.add(ask(name, [20 + at] * 30, max_tokens=20))
    assert run(engine) == alone  # though they preempted each other
    with pytest.raises(OutOfKvCache, match="less than one page"):
        make(SleepTime(), pages=0)


def test_imported_keys_and_values_save_the_prompt() -> None:
    time = SleepTime()
    first, second = make(time), make(time)
    first.add(ask("a", [25] * 400, max_tokens=10))
    tokens = [output.token_id for _ in range(4) for output in first.step()]
    kv = [first.export_kv("a", (0, 10)), first.export_kv("a", (10, 32))]
    assert sum(one.nbytes for one in kv) == 32 * 403 * 2 * kv_shape(PROFILE, 1).head_dim * 4
    time.slept.clear()
    second.add(ask("a", [25] * 400, tokens, max_tokens=10), kv)
    rest = run(second)["a"]
    assert tokens + rest == run_one(ask("a", [25] * 400, max_tokens=10))
    assert max(time.slept) < PROFILE.step_s(StepLoad(tokens=2, sequences=1, context=410))
    with pytest.raises(InvalidSequence, match="other tokens"):
        second.add(ask("b", [26] * 400, max_tokens=10), kv)


def test_keys_and_values_are_exported_in_parts_of_a_step() -> None:
    time, exports = SleepTime(), list[KvExport]()
    engine = make(time)
    engine.add(ask("a", [25] * 400, max_tokens=10))
    engine.export("a", exports.append)
    parts: list[list[int]] = []
    time.on_sleep = lambda: parts.append([part.last for part in _arrived(exports[0])])
    engine.step()
    engine.finish_export("a")
    assert parts == [[], [8], [16], [24]]
    assert sum(time.slept) == pytest.approx(PROFILE.step_s(StepLoad(tokens=400, sequences=1)))
    assert torch.equal(exports[0].wait(0.0).data, engine.export_kv("a").data)


def _arrived(export: KvExport) -> list[KvRange]:
    try:
        return [next(export.arriving(0.0))]
    except TimeoutError:
        return []


def test_a_cancelled_sequence_has_no_more_output() -> None:
    engine = make(SleepTime())
    engine.add(ask("a", [20] * 10))
    engine.add(ask("b", [20] * 10))
    engine.step()
    engine.cancel("a")
    engine.cancel("a")
    assert set(run(engine)) == {"b"}
    engine.close()
    assert engine.step() == [] and engine.sequences == 0


def test_stops_and_logprobs() -> None:
    first = run_one(ask("a", [20]))[0]
    engine = make(SleepTime())
    engine.add(ask("a", [20], stop_token_ids=(first,), logprobs=1))
    (output,) = engine.step()
    assert (output.finish_reason, output.token_id) == ("stop", first)
    assert output.logprob is not None and output.logprob.top == ((first, 0.0),)


def test_work_follows_work() -> None:
    queue = WorkQueue(slower=2)
    assert queue.book(10.0, 1.0) == 12.0
    assert queue.book(10.5, 1.0) == 14.0  # behind what was there
    late_s = Lateness().step_s
    assert queue.book(14.0 + late_s, 1.0) == 16.0  # a late wake-up costs the device nothing
    assert queue.book(16.0 + 3 * late_s, 1.0) == pytest.approx(18.0 + 3 * late_s)  # it was idle


def test_a_stage_waits_for_its_hop() -> None:
    """Of the time for which a pipeline's stage waits for its input, only a wake-up is forgiven."""
    for late_s, gap_s, ends_s in ((0.2e-3, 0.5e-3, 2.0005), (0.2e-3, 0.1e-3, 2.0), (1e-3, 0.5e-3, 2.0)):
        time_s = SleepTime(now_s=0.0)
        clock = DeviceClock(1, Lateness(hop_s=late_s), time_s.now, time_s.sleep)
        clock.run_stage(1.0)
        time_s.now_s += gap_s
        clock.run_stage(1.0)
        assert time_s.now_s == pytest.approx(ends_s)
    assert Lateness().hop_s <= 0.2e-3


def test_two_threads_share_the_device() -> None:
    lock, ends = threading.Lock(), []

    def sleep(seconds: float) -> None:
        with lock:
            ends.append(seconds)

    clock = DeviceClock(1, now=lambda: 5.0, sleep=sleep)
    threads = [threading.Thread(target=clock.run, args=(1.0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == [1.0, 2.0, 3.0, 4.0]


def test_a_prompt_behind_half_of_the_layers_takes_half_of_the_time() -> None:
    time, whole = SleepTime(), SleepTime()
    prompt = list(range(20, 220))
    engine, other = make(time), make(whole)
    other.add(ask("a", prompt, max_tokens=1))
    expected = run(other)
    format = engine.entry_format
    rows, kv = rows_of(prompt, 16, format.row_items), slice_of(format.kv, 0, 16, prompt)
    entry = LayerEntry(rows=rows, kv=kv)
    for wrong in (
        LayerEntry(rows=rows_of(prompt, 15, format.row_items), kv=kv),
        LayerEntry(rows=rows, kv=slice_of(format.kv, 0, 16, [*prompt[1:], 1])),
    ):
        with pytest.raises(InvalidSequence):
            engine.add(ask("a", prompt, max_tokens=1), (), wrong)
    engine.add(ask("a", prompt, max_tokens=1), (), entry)
    assert run(engine) == expected
    load = StepLoad(tokens=200, sequences=1)
    head_s = PROFILE.step_s(load) - 32 * PROFILE.layer_s(load)
    assert sum(time.slept) == pytest.approx(16 * PROFILE.layer_s(load) + head_s)
    assert sum(whole.slept) == pytest.approx(32 * PROFILE.layer_s(load) + head_s)
