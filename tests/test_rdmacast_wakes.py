"""How much of a payload is to be there before its reader is woken."""

from rdmacast.wakes import MOST_BYTES, Wakes

BLOCK = 4 << 20


def test_nothing_is_known_of_a_pace_at_first() -> None:
    wakes = Wakes()
    wakes.begun(10.0)
    assert wakes.came(60_000, BLOCK - 60_000, 10.001) == 1  # what lay there already tells of no pace


def test_who_receives_fast_is_woken_for_much_and_never_for_more_than_comes() -> None:
    wakes = Wakes()
    wakes.begun(0.0)
    assert wakes.came(1 << 20, BLOCK - (1 << 20), 0.01) == MOST_BYTES
    assert wakes.came(BLOCK - (1 << 20) - 1000, 1000, 0.04) == 1000
    assert wakes.came(1000, 0, 0.04) == 1  # the next frame may be a small one
    wakes.begun(0.05)
    assert wakes.came(16, 300_000, 0.05) == 300_000  # the pace of the last one
    assert repr(wakes) == "Wakes(at 1.05e+08 B/s)"


def test_who_receives_slowly_hears_of_little() -> None:
    wakes = Wakes()
    wakes.begun(0.0)
    assert wakes.came(10_000, BLOCK, 0.1) == 2000  # of 100 kB/s
    assert wakes.came(2000, BLOCK, 0.12) == 2000
    assert wakes.came(2000, BLOCK, 1.4) == 200
