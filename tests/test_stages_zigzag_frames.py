"""Frames between the nodes of a pair."""

import pytest

from invoker.stages.frames import LinkLost
from invoker.stages.zigzag_frames import Drop, Given, Offer, PairFrame, PairReader, Said, Take, pack

GIVEN = Given(name="1", layers=2, hidden_bytes=3, kv_bytes=5)


def sent(said: Said, data: bytes = b"") -> bytes:
    return bytes(pack(said)) + data


def read(reader: PairReader, came: bytes, most: int) -> list[PairFrame]:
    """What comes of these bytes, of which at most so many are there at once."""
    frames = []
    while came:
        room = reader.buffer()
        count = min(len(room), len(came), most)
        room[:count], came = came[:count], came[count:]
        frame = reader.advance(count)
        if frame is not None:
            frames.append(frame)
    return frames


@pytest.mark.parametrize("most", [1, 7, 1 << 20])
def test_frames_come_as_they_were_sent(most: int) -> None:
    offer = Offer("1", "call", 2)
    came = sent(offer, bytes(range(16))) + sent(Take()) + sent(GIVEN, b"abcdefgh") + sent(Drop("2"))
    frames = read(PairReader(), came, most)
    assert [frame.said for frame in frames] == [offer, Take(), GIVEN, Drop("2")]
    assert [bytes(frame.data) for frame in frames] == [bytes(range(16)), b"", b"abcdefgh", b""]


def test_a_frames_bytes_are_its_own() -> None:
    reader = PairReader()
    (first,) = read(reader, sent(GIVEN, b"abcdefgh"), 64)
    read(reader, sent(GIVEN, b"ABCDEFGH"), 64)
    assert bytes(first.data) == b"abcdefgh"


def test_what_is_no_frame_of_a_pair_is_refused() -> None:
    with pytest.raises(LinkLost, match="no frame"):
        read(PairReader(), b"x" * 64, 64)
    told = bytearray(sent(GIVEN))
    told[8] += 1  # how many bytes belong to it
    with pytest.raises(LinkLost, match="9 bytes came with Given for 8"):
        read(PairReader(), bytes(told), 64)
