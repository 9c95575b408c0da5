"""Frames of the channel: however they are cut, whatever noise they are."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from registry.channel.frames import HEADER_BYTES, ChannelFrameKind, FrameSplitter, pack, pack_failure
from registry.errors import ChannelError

kinds = st.sampled_from([ChannelFrameKind.OPEN, ChannelFrameKind.DATA, ChannelFrameKind.ERROR])
frames = st.lists(st.tuples(kinds, st.integers(0, 2**32 - 1), st.binary(max_size=200)))


@settings(deadline=None)
@given(frames, st.randoms())
def test_frames_survive_the_wire_however_it_is_cut(
    sent: list[tuple[ChannelFrameKind, int, bytes]], cuts: random.Random
) -> None:
    data = b"".join(pack(*frame) for frame in sent)
    splitter, got = FrameSplitter(1 << 20), []
    while data:
        count = cuts.randint(1, 80)
        piece, data = data[:count], data[count:]
        got += [(kind, call, bytes(body)) for kind, call, body in splitter.split(piece)]
    assert got == sent


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_noise_only_ever_raises_channel_error(noise: bytes) -> None:
    splitter = FrameSplitter(1 << 20)
    try:
        for start in range(0, len(noise), HEADER_BYTES + 2):
            list(splitter.split(noise[start : start + HEADER_BYTES + 2]))
    except ChannelError:
        pass


def test_a_failure_of_any_text_fits_its_frame() -> None:
    frame = pack_failure(1, "x" * 100, "\udc80 and " + "\U0001f40d" * 100_000)
    ((kind, _, body),) = FrameSplitter(1 << 20).split(frame)
    assert kind == ChannelFrameKind.ERROR and len(body) < 16 * 1024
