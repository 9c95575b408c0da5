"""A journal with something wrong in it: that costs only itself, and is logged."""

import logging
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invoker.metering.accounts import MeteredCall
from invoker.metering.events import CallForgotten, JournalFrame
from invoker.metering.journal import recover_journals
from invoker.metering.meter import GpuMeter
from invoker.metering.replay import HEADER, encode_frame, replay
from registry.accounting.reconciliation import BalanceVerdict, reconcile
from registry.records.instance import InstanceState
from registry.records.usage import InstanceInterval, LostCall
from tests.fixtures.usage_histories import ORIGIN_S


class Frames:
    """A journal whose frames are kept apart."""

    def __init__(self) -> None:
        self.all: list[bytes] = []

    def write(self, frame: JournalFrame) -> bool:
        self.all.append(encode_frame(frame))
        return False

    def rotate(self, snapshot: JournalFrame) -> None:
        self.all = [encode_frame(snapshot)]


def history() -> tuple[list[bytes], list[MeteredCall]]:
    """Frames of a meter that was killed: two instances, three intervals, calls settled, lost and running."""
    now, journal = [0], Frames()
    meter = GpuMeter("n0", 1, lambda: now[0], ORIGIN_S, journal)
    left = meter.open_account("left", "f", 1, InstanceState.READY)
    right = meter.open_account("right", "f", 1, InstanceState.READY)
    calls = [meter.open_call(account, f"r{n}/0") for n, account in enumerate((left, right, left, right))]
    for call in calls:
        now[0] += 100
        meter.start_step(call.account)
        now[0] += 1_000
        meter.end_step(call.account, [(call, 1)])
        meter.end_intervals(older_than_us=2_000)
    meter.record_lost(calls[:1])
    meter.close_calls(calls[:1])
    now[0] += 50
    meter.change_state(left, InstanceState.DRAINING)
    now[0] += 50
    meter.tick()
    return journal.all, calls


def reported(data: bytes) -> tuple[list[InstanceInterval], list[LostCall], list[str]]:
    state = replay(data)
    remains = state.unsent_records()
    assert remains == state.unsent_records()
    intervals = [one for one in remains if isinstance(one, InstanceInterval)]
    return intervals, [one for one in remains if isinstance(one, LostCall)], state.faults


def test_a_whole_journal_has_no_faults_and_adds_up() -> None:
    frames, calls = history()
    intervals, lost, faults = reported(b"".join(frames))
    assert not faults and len(lost) == len(calls)
    assert reconcile([], intervals, lost).verdict is BalanceVerdict.EXACT


@pytest.mark.parametrize("flip", ["length", "checksum", "body"])
def test_a_damaged_frame_costs_only_itself(flip: str) -> None:
    frames, _ = history()
    for index in range(1, len(frames)):
        place = sum(map(len, frames[:index]))
        damaged = bytearray(frames[index])
        damaged[{"length": 1, "checksum": 5, "body": len(damaged) - 1}[flip]] ^= 0x41
        without = reported(b"".join([*frames[:index], *frames[index + 1 :]]))
        intervals, lost, faults = reported(b"".join([*frames[:index], bytes(damaged), *frames[index + 1 :]]))
        assert lost == without[1] and f"bytes [{place}, {place + len(damaged)}) are damaged" in faults[0]
        for one in intervals:
            assert min(one.busy_us, one.loading_us, one.idle_us) >= 0
            assert one.busy_us == sum(part.used_us for part in one.calls)
        if index < len(frames) - 1:  # whatever it said, the time up to the last frame is reported
            ends = {one.to_at for one in intervals if one.final}
            assert ends <= {replay(b"".join(frames)).at / 1e6 + ORIGIN_S}


def test_what_is_known_of_a_journal_without_its_beginning_is_delivered() -> None:
    frames, _ = history()
    intervals, lost, faults = reported(b"".join(frames)[3:])
    assert faults and {one.node for one in intervals} == {"n0"} and [one.call_id for one in lost] == ["r0/0"]
    assert not any(one.final for one in intervals)


@pytest.mark.parametrize(
    "tail", [b"\x00" * 64, b"\x00" * 7, encode_frame(JournalFrame(9, [], []))[:-1], b"torn"]
)
def test_a_torn_tail_costs_only_itself(tail: bytes) -> None:
    frames, _ = history()
    whole = b"".join(frames)
    assert reported(whole + tail)[:2] == reported(whole)[:2]
    assert reported(whole + tail)[2] == [
        f"bytes [{len(whole)}, {len(whole + tail)}) are damaged or cut off, up to the end"
    ]


def _framed(body: object) -> bytes:
    data = msgspec.msgpack.encode(body)
    return HEADER.pack(len(data), zlib.crc32(data)) + data


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (("CallForgotten", 999), "of an unknown account or call: CallForgotten(call=999)"),
        (("IntervalCut", 999, "ready", 1.0, (0, 0, 0)), "of an unknown account or call: IntervalCut("),
        (("Dreamt", 1), "Invalid value 'Dreamt'"),
        (("RecordAcked", "much"), "Expected `int`, got `str`"),
    ],
)
def test_a_bad_event_costs_only_itself(
    event: tuple[object, ...], fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frames, _ = history()
    whole = reported(b"".join(frames))
    last = msgspec.msgpack.decode(frames[3][HEADER.size :])
    mixed = _framed([*last[:3], [event, *last[3], event]])
    data = b"".join([*frames[:3], mixed, *frames[4:]])
    assert reported(data)[:2] == whole[:2]
    path = tmp_path / "n0.1.journal"
    path.write_bytes(data)
    with caplog.at_level(logging.ERROR):
        (adopted,) = recover_journals(tmp_path)
    assert list(adopted.records) == replay(b"".join(frames)).unsent_records()
    place = sum(map(len, frames[:3]))
    assert caplog.text.count(fault) == 2 and f"at byte {place}" in caplog.text and str(path) in caplog.text


def test_odd_totals_cost_only_themselves() -> None:
    frames, _ = history()
    whole, at = reported(b"".join(frames)), replay(b"".join(frames)).at
    for body in ([at, [1, 2], [], []], [at, [], [7], []], [at, "no list"], {"no": "frame"}, [at, [], [], 5]):
        odd = reported(b"".join([*frames, _framed(body)]))
        assert odd[:2] == whole[:2] and len(odd[2]) == 1


@given(st.data())
@settings(max_examples=60)
def test_no_damage_keeps_a_journal_from_being_read(data: st.DataObject) -> None:
    frames, _ = history()
    journal = bytearray(b"".join(frames))
    for place in data.draw(st.lists(st.integers(0, len(journal) - 1), max_size=8)):
        journal[place] = data.draw(st.integers(0, 255))
    intervals, lost, _ = reported(bytes(journal[: data.draw(st.integers(0, len(journal)))]))
    for one in intervals:
        assert min(one.busy_us, one.loading_us, one.idle_us) >= 0
        assert one.busy_us == sum(part.used_us for part in one.calls)
    assert len({one.id for one in lost}) == len(lost)


def test_a_call_that_is_forgotten_twice_is_settled_once() -> None:
    frames, calls = history()
    again = encode_frame(JournalFrame(replay(b"".join(frames)).at, [], [], [CallForgotten(calls[0].number)]))
    assert reported(b"".join([*frames, again]))[:2] == reported(b"".join(frames))[:2]
