"""Which progress of a load is reported."""

from hypothesis import given
from hypothesis import strategies as st

from invoker.loading.progress import LayerReports, ProgressThrottle

LAYERS = 40


class Times:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def reports_of(load_s: float, layers: int = LAYERS) -> list[int]:
    """Return what is reported of a load whose layers arrive evenly within `load_s`."""
    times, seen = Times(), [0]
    reports = LayerReports(times)
    for layer in range(layers):
        times.now_s = load_s * (layer + 1) / layers
        reported = reports((1 << layer + 1) - 1, layers)
        if reported != seen[-1]:
            seen.append(reported)
    return seen[1:]


def test_a_short_load_reports_its_eighths_and_a_long_one_each_layer() -> None:
    eighths = [(1 << 5 * part) - 1 for part in range(1, 9)]
    assert reports_of(0.2) == [0b1, *eighths]
    assert len(reports_of(0.4)) <= 17
    assert reports_of(4.0) == [(1 << layer) - 1 for layer in range(1, LAYERS + 1)]


@given(load_s=st.floats(0.001, 10.0), layers=st.integers(1, 100))
def test_what_is_reported_was_loaded_and_the_end_is_never_left_out(load_s: float, layers: int) -> None:
    seen = reports_of(load_s, layers)
    assert seen == sorted(seen) and seen[-1] == (1 << layers) - 1
    assert len(seen) <= 8 + load_s / 0.05 + 1


def test_the_first_fraction_and_the_last_are_reported_and_few_between() -> None:
    times, seen = Times(), list[float]()
    report = ProgressThrottle(seen.append, times)
    for step in range(1, 101):
        times.now_s = step / 100
        report(step / 100)
    assert seen[0] == 0.01 and seen[-1] == 1.0 and len(seen) <= 12
