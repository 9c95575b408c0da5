"""The figures of starts of vLLM on a platform, from the times of tokens, servers and casts."""

from collections.abc import Sequence

import pytest

from benchmarks.harness.local_platform import PlatformStateError
from benchmarks.stock_engines.cast_start import GIB, CastRound, CastSeen, shortfall
from benchmarks.stock_engines.platform_start import TokenStream, figures_of_start
from benchmarks.stock_engines.vllm_server import StartTimes, read_load_s


def test_gaps_are_within_streams_and_at_the_switch() -> None:
    streams = [
        TokenStream(ids=(1, 2, 3), arrived_s=(10.5, 14.5, 15.0)),  # a gap of 4 s, long before the switch
        TokenStream(ids=(1, 2, 3), arrived_s=(24.0, 24.5, 25.75)),
    ]
    found = figures_of_start(10.0, 25.0, streams)
    assert (found.first_token_s, found.ready_s, found.stream_s) == (0.5, 15.0, 15.75)
    assert (found.largest_gap_s, found.gap_at_switch_s) == (4.0, 1.25)
    assert found.streams == ((1, 2, 3), (1, 2, 3))


def test_a_start_without_a_stream_at_the_switch_has_no_figures() -> None:
    early = TokenStream(ids=(1, 2), arrived_s=(10.5, 11.0))
    with pytest.raises(PlatformStateError, match="no stream ran"):
        figures_of_start(10.0, 25.0, [early])


def _started(ready_s: float, ids: Sequence[int] = (7, 8)) -> StartTimes:
    return StartTimes(ready_s=ready_s, first_token_s=ready_s + 1.0, ids=tuple(ids), load_s=0.5)


def _round(last: StartTimes) -> CastRound:
    cast = CastSeen(planner="binomial", seconds=10.0, received=100)
    return CastRound(
        one=_started(12.0),
        start=[_started(29.0), _started(30.0)],
        transfer=cast,
        during_cast=[_started(32.0), last],
        casts=[cast],
    )


def test_a_start_during_a_cast_counts_until_the_last_engine_serves() -> None:
    found = _round(_started(36.0))
    assert (found.start_s, found.during_cast_s, found.over_start_s) == (30.0, 36.0, 6.0)
    assert found.ratio == pytest.approx(0.9)


def test_the_tokens_of_each_engine_count() -> None:
    assert _round(_started(36.0)).has_tokens([7, 8])
    assert not _round(_started(36.0, ids=(7, 9))).has_tokens([7, 8])


def test_a_cast_that_did_not_end_well_has_no_figures() -> None:
    shown = {"state": "complete", "planner": "chain", "seconds": 2.0, "received": {"tcp": 3, "shm": 4}}
    assert CastSeen.of(shown) == CastSeen(planner="chain", seconds=2.0, received=7)
    with pytest.raises(PlatformStateError, match="failed"):
        CastSeen.of(shown | {"state": "failed"})


def test_memory_for_all_engines_is_checked_before() -> None:
    assert shortfall(2, GIB, 3 * GIB, 16 * GIB) == ""
    assert "needs 3.0 GiB of shared memory, 2.0 GiB are free" in shortfall(2, GIB, 2 * GIB, 16 * GIB)
    assert "of memory, 8.0 GiB are free: use fewer engines" in shortfall(2, GIB, 3 * GIB, 8 * GIB)


def test_the_time_of_the_load_is_in_the_log() -> None:
    log = "INFO [loader.py:56] Hypercast: all parameters, 593308672 bytes, 1.250 s\nready"
    assert read_load_s(log) == 1.25
    assert read_load_s("INFO ready") == 0.0
