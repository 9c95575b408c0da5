"""One cast of one contender: told to a crew, timed, and its bytes checked."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.crew import Crew
from benchmarks.crew_member import digest, make_image
from benchmarks.crew_messages import CastTask, Check, Checked, Done, Go, NodeAt, Prepare, Ready
from benchmarks.processor import ProcessorTimes, read_times
from registry.images.verify import unit_checksums


class WrongBytes(Exception):
    """A contender did not deliver what was cast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CastImage:
    """What is cast: bytes that every source can make for itself, and their checksums."""

    nbytes: int
    seed: int
    digest: str
    units: bytes

    @classmethod
    def make(cls, nbytes: int, seed: int) -> "CastImage":
        made = make_image(nbytes, seed)
        return cls(nbytes=nbytes, seed=seed, digest=digest(made), units=unit_checksums(made.data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The times of one cast, in seconds from when the first process began.

    `used` is of the whole machine, `own_cpu_s` what the contender's processes used.

    `complete_s` is by target, in order of rank; `arrived_s` the moment of each block at each target, of
    contenders that know it; `transports` the bytes that targets received by transport; `faults` how many
    pulls went wrong or elsewhere than planned, by kind.
    """

    complete_s: tuple[float, ...]
    used: ProcessorTimes
    own_cpu_s: float
    arrived_s: tuple[tuple[float, ...], ...] = ()
    transports: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return max(self.complete_s)

    @property
    def first_full_s(self) -> float:
        return min(self.complete_s)

    @property
    def skew_s(self) -> float:
        return self.seconds - self.first_full_s


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to broadcast: a crew, and for ours the task and why it was chosen, if we did choose.

    `sources` ranks, the first ones, hold the image.
    """

    name: str
    crew: Crew
    nodes: int
    task: CastTask | None = None
    algorithm: str = ""
    reason: str = ""

    @property
    def sources(self) -> int:
        return self.task.sources if self.task else 1

    @property
    def title(self) -> str:
        """For people."""
        details = f"{self.task.blocks} blocks, k = {self.sources}" if self.task else self.algorithm
        return f"{self.name} ({details})" if details else self.name

    def run(self, image: CastImage, cast: str, patience_s: float) -> Run:
        """Raises CrewError and WrongBytes."""
        order = Prepare(
            nbytes=image.nbytes,
            seed=image.seed,
            cast=cast,
            task=self.task,
            nodes=[NodeAt(url=hello.url, host=hello.host) for hello in self.crew.hellos],
            units=image.units if self.task else b"",
        )
        self.crew.ask(order, Ready, patience_s)
        before = read_times()
        done = self.crew.ask(Go(), Done, patience_s)
        used = read_times().since(before)
        told = self.crew.ask(Check(), Checked, patience_s)
        wrong = [rank for rank, checked in enumerate(told) if checked.digest != image.digest]
        if wrong:
            raise WrongBytes(f"{self.title}: the bytes of ranks {wrong} are not those that were cast")
        return timed(done, self.sources, used, sum(checked.cpu_s for checked in told))


def timed(done: Sequence[Done], sources: int, used: ProcessorTimes, own_cpu_s: float) -> Run:
    """What the processes told, as times from their beginning (pure)."""
    began_s = min(one.began_s for one in done)
    targets = done[sources:]
    return Run(
        complete_s=tuple(one.ended_s - began_s for one in targets),
        used=used,
        own_cpu_s=own_cpu_s,
        arrived_s=tuple(
            tuple(moment - began_s for moment in one.arrived_s) for one in targets if one.arrived_s
        ),
        transports=added(one.transports for one in targets),
        faults=added(one.faults for one in targets),
    )


def added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
