"""The last lines of each function's log."""

from invoker.log_rings import LogRings
from registry.clock import FakeClock


def test_log_rings_are_bounded() -> None:
    rings = LogRings(FakeClock())
    for number in range(300):
        rings.add(f"f{number}", "one\ntwo")
    assert rings.tail("f0", 10) == () and len(rings.tail("f299", 10)) == 2
    for number in range(2000):
        rings.add("f299", f"line {number}")
    lines = rings.tail("f299", 5000)
    assert len(lines) == 1000 and lines[-1].endswith("Z line 1999")
    assert lines[-1].startswith("2023-11-14T22:13:20.000Z")
    assert rings.tail("f299", 0) == ()
