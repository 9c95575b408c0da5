"""Times of streams within windows (pure)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.harness.stream_client import StreamResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A span in which a condition held, by `time.perf_counter`; with a cast, its duration and sources."""

    condition: str
    started_s: float
    ended_s: float
    cast_s: float = 0.0
    sources: tuple[str, ...] = ()

    def has(self, moment_s: float) -> bool:
        return self.started_s <= moment_s <= self.ended_s


def gaps_within(streams: Iterable[StreamResult], windows: Sequence[Window]) -> list[float]:
    """Return the seconds between successive tokens, for those of which the second came within a window."""
    gaps = []
    for one in streams:
        tokens_s = [at_s for at_s in one.events_s[: one.completion_tokens] if at_s <= one.last_s]
        gaps += [
            after - before
            for before, after in pairwise(tokens_s)
            if any(window.has(after) for window in windows)
        ]
    return gaps


def first_tokens_within(streams: Iterable[StreamResult], windows: Sequence[Window]) -> list[float]:
    """Return the seconds to the first token of streams that were due within a window."""
    return [one.ttft_s for one in streams if any(window.has(one.due_s) for window in windows)]
