"""Takes the contenders of a multicast benchmark in turns."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.arguments import say
from benchmarks.crew import CrewError
from benchmarks.link_rate import LinkRate
from benchmarks.multicast_run import CastImage, Contender, Run

WARM_UP_PART = 16  # the first turn, which is not counted, casts a sixteenth
SEED = 1
_LOG_LINES = 20


@dataclass(slots=True)
class Turns:
    """Contenders, what they cast, and how they did; `copies` are those of a plain link."""

    contenders: list[Contender]
    runs: list[list[Run]] = field(default_factory=list)
    copies: list[LinkRate] = field(default_factory=list)


def take_turns(
    contenders: list[Contender],
    nbytes: int,
    repeat: int,
    patience_s: float,
    copy: Callable[[], LinkRate] | None,
) -> Turns:
    """Each contender once a turn; the first turn is short and not counted. Raises CrewError, WrongBytes."""
    turns = Turns(contenders, runs=[[] for _ in contenders])
    short, whole = CastImage.make(max(1, nbytes // WARM_UP_PART), SEED), CastImage.make(nbytes, SEED)
    began_s = time.monotonic()
    for turn in range(-1, repeat):
        if turn == 0:
            began_s = time.monotonic()
        if copy is not None and turn >= 0:
            turns.copies.append(copy())
        for number, contender in enumerate(contenders):
            run = contender.run(short if turn < 0 else whole, f"{turn}-{number}", patience_s)
            stage = f"turn {turn + 1} of {repeat}" if turn >= 0 else "warming up"
            say(
                f"{contender.nodes} nodes, {stage}, {number + 1} of {len(contenders)}: {contender.title}"
                f" {run.seconds:.3f} s, processors {run.used.share:.0%} busy"
            )
            if turn >= 0:
                turns.runs[number].append(run)
        if turn >= 0:
            left_s = (time.monotonic() - began_s) / (turn + 1) * (repeat - turn - 1)
            say(f"{turn + 1} of {repeat} turns; about {left_s:.0f} s left for these")
    return turns


@contextmanager
def logs_shown(folder: Path) -> Iterator[None]:
    """Where a process of a crew fails, what it and the others said last goes to stderr."""
    try:
        yield
    except CrewError:
        for log in sorted(folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            say("\n".join([f"-- {log.name}", *lines]) if lines else f"-- {log.name}: empty")
        raise
