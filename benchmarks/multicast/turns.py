"""Runs the contenders of a multicast benchmark in turns."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.arguments import say
from benchmarks.harness.crew import CrewError
from benchmarks.multicast.run import CastImage, CastRun, MulticastContender
from benchmarks.testbed.link_rate import LinkMeasurement

_WARM_UP_PART = 16  # the uncounted first turn casts a sixteenth
_SEED = 1
_LOG_LINES = 20


@dataclass(slots=True)
class TurnResults:
    """Contenders and their runs; `copies` are plain copies over a link.

    `counts` has by how much the counter of `take_turns` rose in each run.
    """

    contenders: list[MulticastContender]
    runs: list[list[CastRun]] = field(default_factory=list)
    copies: list[LinkMeasurement] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)

    @property
    def fastest_copy_s(self) -> float:
        return min(copy.seconds for copy in self.copies)


def take_turns(
    contenders: list[MulticastContender],
    nbytes: int,
    repeat: int,
    patience_s: float,
    copy: Callable[[], LinkMeasurement] | None,
    counter: Callable[[], int] = lambda: 0,
) -> TurnResults:
    """Run each contender once per turn, after a short uncounted one; read the counter around each run.

    Raises CrewError, DigestMismatch.
    """
    turns = TurnResults(contenders, runs=[[] for _ in contenders], counts=[[] for _ in contenders])
    short, whole = CastImage.make(max(1, nbytes // _WARM_UP_PART), _SEED), CastImage.make(nbytes, _SEED)
    started_s = time.monotonic()
    for turn in range(-1, repeat):
        if turn == 0:
            started_s = time.monotonic()
        if copy is not None and turn >= 0:
            turns.copies.append(copy())
        for number, contender in enumerate(contenders):
            before = counter()
            run = contender.run(short if turn < 0 else whole, f"{turn}-{number}", patience_s)
            count = counter() - before
            stage = f"turn {turn + 1} of {repeat}" if turn >= 0 else "warming up"
            say(
                f"{contender.nodes} nodes, {stage}, {number + 1} of {len(contenders)}: {contender.title}"
                f" {run.seconds:.3f} s, CPU {run.used.share:.0%}"
            )
            if turn >= 0:
                turns.runs[number].append(run)
                turns.counts[number].append(count)
        if turn >= 0:
            left_s = (time.monotonic() - started_s) / (turn + 1) * (repeat - turn - 1)
            say(f"{turn + 1} of {repeat} turns, about {left_s:.0f} s left")
    return turns


@contextmanager
def print_logs_on_error(folder: Path) -> Iterator[None]:
    """Print the end of each process's log to stderr when a crew fails."""
    try:
        yield
    except CrewError:
        for log in sorted(folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            say("\n".join([f"-- {log.name}", *lines]) if lines else f"-- {log.name}: empty")
        raise
