"""Growing demand that is taken up step by step."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.state_cache import VersionKey
from gateway.planning.debounce import DemandDebouncer, settle_s
from gateway.planning.plan import VersionDemand
from gateway.planning.work import TokenLoad

KEY, OTHER = VersionKey("f", 1), VersionKey("g", 1)


def leading(settle: Callable[[VersionKey], float] = lambda key: 0.1) -> DemandDebouncer:
    """Of one who led before anything was asked for."""
    debouncer = DemandDebouncer(settle)
    assert debouncer.debounce({}, 0.0) == ({}, None)
    return debouncer


def calls(held: int, in_flight: int = 0) -> VersionDemand:
    return VersionDemand(held=held, in_flight=in_flight)


def test_a_burst_counts_as_one_after_its_first_call() -> None:
    debouncer = leading()
    assert debouncer.debounce({KEY: calls(3)}, 1.0) == ({KEY: calls(1)}, 1.1)
    assert debouncer.debounce({KEY: calls(20)}, 1.05) == ({KEY: calls(1)}, 1.1)
    assert debouncer.debounce({KEY: calls(50)}, 1.1) == ({KEY: calls(50)}, None)
    # What comes later waits for its own time, and what was counted stays.
    assert debouncer.debounce({KEY: calls(2, 52)}, 1.2) == ({KEY: calls(50)}, 1.3)
    assert debouncer.debounce({KEY: calls(2, 55)}, 1.3) == ({KEY: calls(2, 55)}, None)


def test_who_begins_to_lead_counts_what_it_finds() -> None:
    debouncer = DemandDebouncer(lambda key: 0.1)
    assert debouncer.debounce({KEY: calls(3, 20)}, 1.0) == ({KEY: calls(3, 20)}, None)
    assert debouncer.debounce({KEY: calls(9, 20)}, 2.0) == ({KEY: calls(3, 20)}, 2.1)
    debouncer.reset()
    assert debouncer.debounce({KEY: calls(9, 20)}, 2.05) == ({KEY: calls(9, 20)}, None)


def test_what_is_less_counts_at_once() -> None:
    debouncer = leading()
    debouncer.debounce({KEY: calls(9)}, 0.0)
    assert debouncer.debounce({KEY: calls(9)}, 0.1)[0] == {KEY: calls(9)}
    assert debouncer.debounce({KEY: calls(0, 4)}, 0.2) == ({KEY: calls(0, 4)}, None)
    assert debouncer.debounce({KEY: calls(1, 4)}, 0.3) == ({KEY: calls(0, 4)}, 0.4)
    assert debouncer.debounce({KEY: calls(0, 3)}, 0.39) == ({KEY: calls(0, 3)}, None)
    assert debouncer.debounce({KEY: calls(0, 4)}, 0.41) == ({KEY: calls(0, 3)}, 0.51)
    assert debouncer.debounce({}, 0.42) == ({}, None)
    assert repr(debouncer) == "<DemandDebouncer {}>"


def test_counters_of_arrivals_stay_while_a_burst_waits() -> None:
    tokens = TokenLoad(arrived_calls=50, arrived_tokens=5000)
    debouncer = leading()
    debouncer.debounce({KEY: VersionDemand(tokens=tokens)}, 0.5)
    burst = VersionDemand(held=9, tokens=TokenLoad(held_tokens=900, arrived_calls=59, arrived_tokens=5900))
    counted, _ = debouncer.debounce({KEY: burst}, 1.0)
    assert counted == {KEY: VersionDemand(held=1, tokens=tokens)}


def test_each_version_has_its_own_time() -> None:
    debouncer = leading(lambda key: 0.1 if key == KEY else 0.0)
    assert debouncer.debounce({KEY: calls(2), OTHER: calls(2)}, 0.0) == (
        {KEY: calls(1), OTHER: calls(2)},
        0.1,
    )


def test_a_small_part_of_what_a_copy_takes() -> None:
    assert settle_s(26 << 30, 1.25e9) == 0.04
    assert 0.015 < settle_s(1 << 30, 1.25e9) < 0.02
    assert settle_s(1 << 20, 1.25e9) == 0.0  # it would be there before


@given(st.lists(st.tuples(st.floats(0.0, 0.2), st.integers(0, 60)), max_size=30))
def test_nothing_is_put_off_for_longer_than_its_time(steps: list[tuple[float, int]]) -> None:
    debouncer, now = leading(), 0.0
    more_since: float | None = None
    for pause_s, held in steps:
        now += pause_s
        counted, again_at = debouncer.debounce({KEY: calls(held)}, now)
        assert min(1, held) <= counted[KEY].calls <= max(1, held)
        more_since = (now if more_since is None else more_since) if counted[KEY].calls < held else None
        if more_since is not None:
            assert again_at is not None and now < again_at <= more_since + 0.1
