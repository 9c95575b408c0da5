"""The figures of a start of vLLM on a platform, from the times of tokens."""

import pytest

from benchmarks.harness.local_platform import PlatformStateError
from benchmarks.stock_engines.platform_start import TokenStream, figures_of_start


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
