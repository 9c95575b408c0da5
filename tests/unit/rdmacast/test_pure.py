"""rdmacast's pure parts: frames, intervals, pacing, keepalive, choice and the bookkeeping of a pull."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacast.bitfield import MAX_BLOCKS, Bitfield
from rdmacast.errors import NoTransport, ProtocolError
from rdmacast.intervals import IntervalSet
from rdmacast.pacer import Pacer
from rdmacast.plan_slot import PlanSlot
from rdmacast.protocol import wire
from rdmacast.protocol.framing import FrameAssembler
from rdmacast.protocol.keepalive import Keepalive
from rdmacast.transport import PeerAddress
from rdmacast.transports.choose import choose

ids = st.integers(0, 2**32 - 1)
regions = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=128)
kinds = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=16)
lengths = st.integers(1, wire.MAX_READ_BYTES)
offsets = st.integers(0, wire.MAX_OFFSET)
texts = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=60)
slots = st.integers(0, 2**31 - 1).flatmap(
    lambda step: st.builds(
        PlanSlot, mark=st.integers(0, 2**32 - 1), step=st.just(step), after=st.integers(0, step)
    )
)
frames = st.one_of(
    st.builds(wire.Greeting, offsets, texts),
    st.builds(wire.Read, ids, regions, offsets, lengths),
    st.builds(wire.SlotRead, ids, regions, offsets, lengths, slots),
    st.builds(wire.TransportRequest, ids, kinds, regions, offsets, lengths, st.binary(max_size=256)),
    st.builds(wire.TransportRequest, ids, kinds, payload=st.binary(max_size=256)),
    st.builds(wire.TransportReply, ids, st.binary(max_size=1000)),
    st.builds(wire.Cancel, ids),
    st.builds(wire.Error, ids, st.sampled_from(wire.ErrorCode), texts),
    st.just(wire.Ping()),
    st.just(wire.Pong()),
)


def _feed(assembler: FrameAssembler, data: bytes, cuts: random.Random) -> list[wire.Frame]:
    """Give the assembler `data` in random pieces; payload goes to a buffer of its own."""
    out: list[wire.Frame] = []
    rest = memoryview(data)
    while rest:
        buffer = assembler.buffer(1 << 20)
        count = min(len(buffer), len(rest), cuts.randint(1, 64))
        buffer[:count] = rest[:count]
        was_payload = assembler.in_payload
        frame = assembler.advance(count)
        if isinstance(frame, wire.Data) and not was_payload:
            assembler.take_payload(frame, memoryview(bytearray(frame.length)))
        elif frame is not None:
            out.append(frame)
        rest = rest[count:]
    return out


@given(st.lists(st.one_of(frames, st.builds(wire.Data, ids, st.integers(1, 300)))), st.randoms())
def test_frames_survive_the_wire_however_it_is_cut(sent: list[wire.Frame], cuts: random.Random) -> None:
    data = b"".join(
        wire.encode(frame) + (bytes(frame.length) if isinstance(frame, wire.Data) else b"") for frame in sent
    )
    assert _feed(FrameAssembler(), data, cuts) == sent


def _feed_ahead(data: bytes, cuts: random.Random) -> list[wire.Frame]:
    """Give an assembler that reads ahead `data` in random pieces, which hold parts of frames, or several."""
    assembler = FrameAssembler(ahead=True)
    out: list[wire.Frame] = []
    rest = memoryview(data)
    while rest:
        buffer = assembler.buffer(1 << 20)
        count = min(len(buffer), len(rest), cuts.choice((3, 20, 300, 5000)))
        buffer[:count] = rest[:count]
        frame = assembler.advance(count)
        while frame is not None:
            out.append(frame)
            frame = assembler.advance(0)
        rest = rest[count:]
    return out


@given(st.lists(frames), st.randoms())
def test_frames_that_come_several_at_once_are_all_found(sent: list[wire.Frame], cuts: random.Random) -> None:
    assert _feed_ahead(b"".join(map(wire.encode, sent)), cuts) == sent


def test_frames_as_long_as_may_be_are_found_one_behind_the_other() -> None:
    most = Bitfield(blocks=MAX_BLOCKS, epoch=1, held=1)
    sent = [wire.Have(1, 2, most), wire.Ping(), wire.Have(3, 4, most)] * 3
    assert _feed_ahead(b"".join(map(wire.encode, sent)), random.Random(0)) == sent


@settings(max_examples=300)
@given(st.binary(max_size=400), st.randoms())
def test_noise_only_ever_raises_protocol_error(noise: bytes, cuts: random.Random) -> None:
    try:
        _feed(FrameAssembler(), noise, cuts)
    except ProtocolError:
        pass


@settings(max_examples=300)
@given(st.lists(frames, min_size=1, max_size=4), st.data())
def test_damaged_frames_only_ever_raise_protocol_error(sent: list[wire.Frame], data: st.DataObject) -> None:
    stream = bytearray(b"".join(map(wire.encode, sent)))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    try:
        _feed(FrameAssembler(), bytes(stream), random.Random(0))
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "frame",
    [
        wire.Read(1, "", 0, 1),
        wire.Read(1, "r" * 129, 0, 1),
        wire.Read(1, "naïve", 0, 1),
        wire.Read(1, "r", 0, 0),
        wire.Read(1, "r", -1, 1),
        wire.Read(1, "r", 0, wire.MAX_READ_BYTES + 1),
        wire.TransportRequest(1, ""),
        wire.TransportRequest(1, "k" * 17),
        wire.TransportRequest(1, "naïve"),
        wire.TransportRequest(1, "shm", "r" * 129, 0, 1),
        wire.TransportRequest(1, "shm", "r", 0, 0),
        wire.TransportRequest(1, "shm", "", 0, 1),
        wire.TransportRequest(1, "shm", payload=bytes(wire.MAX_REQUEST_PAYLOAD_BYTES + 1)),
        wire.TransportReply(1, bytes(wire.MAX_REPLY_PAYLOAD_BYTES + 1)),
    ],
)
def test_frames_out_of_bounds_are_not_sent(frame: wire.Frame) -> None:
    with pytest.raises(ProtocolError):
        wire.encode(frame)


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=20)


@given(ranges, st.integers(0, 60), st.integers(0, 60))
def test_an_interval_set_is_a_set_of_bytes(added: list[tuple[int, int]], start: int, end: int) -> None:
    have, model = IntervalSet(), set[int]()
    for low, high in added:
        have.add(low, high)
        model.update(range(low, high))
    assert {byte for low, high in have.ranges for byte in range(low, high)} == model
    assert all(a[1] < b[0] for a, b in zip(have.ranges, have.ranges[1:], strict=False))
    assert have.covers(start, end) == (set(range(start, end)) <= model)
    gaps = {byte for low, high in have.missing(start, end) for byte in range(low, high)}
    assert gaps == set(range(start, end)) - model


@given(st.floats(1e3, 1e9), st.integers(1, 6), st.randoms())
def test_the_pacer_keeps_its_rate_and_is_fair(rate: float, links: int, jitter: random.Random) -> None:
    pacer = Pacer(rate)
    now_s = dict.fromkeys(range(links), 0.0)
    moved = dict.fromkeys(now_s, 0)
    log: list[tuple[float, int]] = []
    for _ in range(60 * links):
        link = min(now_s, key=lambda each: (now_s[each], moved[each]))
        nbytes = jitter.randint(1, pacer.piece_bytes) if links == 1 else pacer.piece_bytes
        now_s[link] += pacer.reserve(now_s[link], nbytes)
        moved[link] += nbytes
        log.append((now_s[link], nbytes))
    log.sort()
    for first in range(0, len(log), 7):
        span_s = log[-1][0] - log[first][0]
        total = sum(nbytes for _, nbytes in log[first:])
        assert total <= rate * span_s * 1.001 + 4 * pacer.piece_bytes
    assert max(moved.values()) - min(moved.values()) <= 2 * pacer.piece_bytes or links == 1


def test_an_idle_pacer_saves_up_no_more_than_its_burst() -> None:
    pacer = Pacer(1000.0, burst_bytes=500)
    assert pacer.reserve(100.0, 500) == 0.0
    assert pacer.reserve(100.0, 500) == 0.0
    assert pacer.reserve(100.0, 500) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="link rate"):
        Pacer(0)


def test_keepalive_gives_up_but_forgives_our_own_sleep() -> None:
    keepalive = Keepalive(interval_s=5, timeout_s=15, now_s=0)
    assert not keepalive.is_dead(5)
    keepalive.on_data(9)
    assert [keepalive.is_dead(t) for t in (10, 15, 20, 24)] == [False, False, False, True]
    late = Keepalive(interval_s=5, timeout_s=15, now_s=0)
    assert not late.is_dead(60)  # we were stopped, not the peer


@pytest.mark.parametrize(
    ("local", "peer", "available", "require", "expected"),
    [
        ("a", "a", {"tcp", "shm"}, None, "shm"),
        ("a", "b", {"tcp", "shm"}, None, "tcp"),
        ("", "", {"tcp", "shm"}, None, "tcp"),
        ("a", "a", {"tcp"}, None, "tcp"),
        ("a", "a", {"tcp", "shm"}, "tcp", "tcp"),
        ("a", "b", {"tcp", "shm"}, "shm", None),
        ("a", "a", {"tcp"}, "shm", None),
        ("a", "b", {"shm"}, None, None),
    ],
)
def test_the_best_transport_is_chosen_with_a_reason(
    local: str, peer: str, available: set[str], require: str | None, expected: str | None
) -> None:
    address = PeerAddress(url="tcp://h:1", host=peer)
    if expected is None:
        with pytest.raises(NoTransport):
            choose(local, address, available, require)
    else:
        choice = choose(local, address, available, require)
        assert choice.transport == expected and choice.reason
