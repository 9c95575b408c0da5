"""Frames between the nodes of a pair."""

import pytest

from invoker.links.framing import FrameReader, LinkFrame, LinkLost
from invoker.prefill.frames import (
    PairMessage,
    PromptDrop,
    PromptHandover,
    PromptOffer,
    PromptRequest,
    encode,
    pair_reader,
)

GIVEN = PromptHandover(name="1", layers=2, hidden_bytes=3, kv_bytes=5)


def sent(said: PairMessage, data: bytes = b"") -> bytes:
    return bytes(encode(said)) + data


def read(reader: FrameReader[PairMessage], came: bytes, most: int) -> list[LinkFrame[PairMessage]]:
    """Return the frames in `came`, read at most `most` bytes at a time."""
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
    offer = PromptOffer("1", "call", 2)
    came = (
        sent(offer, bytes(range(16)))
        + sent(PromptRequest())
        + sent(GIVEN, b"abcdefgh")
        + sent(PromptDrop("2"))
    )
    frames = read(pair_reader(), came, most)
    assert [frame.message for frame in frames] == [offer, PromptRequest(), GIVEN, PromptDrop("2")]
    assert [bytes(frame.payload) for frame in frames] == [bytes(range(16)), b"", b"abcdefgh", b""]


def test_a_frames_bytes_are_its_own() -> None:
    reader = pair_reader()
    (first,) = read(reader, sent(GIVEN, b"abcdefgh"), 64)
    read(reader, sent(GIVEN, b"ABCDEFGH"), 64)
    assert bytes(first.payload) == b"abcdefgh"


def test_what_is_no_frame_of_a_pair_is_refused() -> None:
    with pytest.raises(LinkLost, match="not a frame"):
        read(pair_reader(), b"x" * 64, 64)
    damaged = bytearray(sent(GIVEN))
    damaged[12] += 1  # how many bytes belong to it
    with pytest.raises(LinkLost, match="9 bytes, expected 8"):
        read(pair_reader(), bytes(damaged), 64)
