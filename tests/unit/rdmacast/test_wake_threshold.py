"""The number of received bytes at which a reader is woken."""

from rdmacast.protocol.wake_threshold import MAX_WAKE_BYTES, WakeThreshold

BLOCK = 4 << 20


def test_nothing_is_known_of_a_pace_at_first() -> None:
    threshold = WakeThreshold()
    threshold.on_payload(10.0)
    assert threshold.on_data(60_000, BLOCK - 60_000, 10.001) == 1  # what lay there already shows no rate


def test_who_receives_fast_is_woken_for_much_and_never_for_more_than_comes() -> None:
    threshold = WakeThreshold()
    threshold.on_payload(0.0)
    assert threshold.on_data(1 << 20, BLOCK - (1 << 20), 0.01) == MAX_WAKE_BYTES
    assert threshold.on_data(BLOCK - (1 << 20) - 1000, 1000, 0.04) == 1000
    assert threshold.on_data(1000, 0, 0.04) == 1  # the next frame may be a small one
    threshold.on_payload(0.05)
    assert threshold.on_data(16, 300_000, 0.05) == 300_000  # the pace of the last one
    assert repr(threshold) == "WakeThreshold(at 1.05e+08 B/s)"


def test_who_receives_slowly_hears_of_little() -> None:
    threshold = WakeThreshold()
    threshold.on_payload(0.0)
    assert threshold.on_data(10_000, BLOCK, 0.1) == 2000  # of 100 kB/s
    assert threshold.on_data(2000, BLOCK, 0.12) == 2000
    assert threshold.on_data(2000, BLOCK, 1.4) == 200
