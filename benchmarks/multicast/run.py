"""One cast of one contender: ordered from a crew, timed and verified."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness.crew import Crew
from benchmarks.harness.processor import ProcessorTimes, read_times
from benchmarks.multicast.messages import (
    CastFinished,
    DigestReport,
    ImageReady,
    MulticastTask,
    NodeEndpoint,
    PrepareImage,
    ReportDigest,
    StartCast,
)
from benchmarks.multicast.rank import digest, make_image
from registry.images.verify import unit_checksums


class DigestMismatch(Exception):
    """A contender did not deliver the bytes that were cast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CastImage:
    """The image of a cast: bytes that every source can generate, and their checksums."""

    nbytes: int
    seed: int
    digest: str
    units: bytes

    @classmethod
    def make(cls, nbytes: int, seed: int) -> "CastImage":
        made = make_image(nbytes, seed)
        return cls(nbytes=nbytes, seed=seed, digest=digest(made), units=unit_checksums(made.data))


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRun:
    """The times of one cast, in seconds since the first process started.

    `used` is of the whole machine, `own_cpu_s` of the contender's processes; `complete_s` is by target, in
    order of rank; `arrived_s` the arrival of each block at each target, where known; `transports` the bytes
    received by transport; `faults` the number of failed or replanned pulls, by kind.
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
class MulticastContender:
    """A way to broadcast: a crew, and for ours the task and the reason for it, if chosen automatically.

    The first `sources` ranks hold the image.
    """

    name: str
    crew: Crew
    nodes: int
    task: MulticastTask | None = None
    algorithm: str = ""
    reason: str = ""

    @property
    def sources(self) -> int:
        return self.task.sources if self.task else 1

    @property
    def title(self) -> str:
        """The contender's name in progress lines."""
        details = f"{self.task.blocks} blocks, k = {self.sources}" if self.task else self.algorithm
        return f"{self.name} ({details})" if details else self.name

    def run(self, image: CastImage, cast: str, patience_s: float) -> CastRun:
        """Cast once. Raises CrewError and DigestMismatch."""
        order = PrepareImage(
            nbytes=image.nbytes,
            seed=image.seed,
            cast=cast,
            task=self.task,
            nodes=[NodeEndpoint(url=hello.url, host=hello.host) for hello in self.crew.hellos],
            units=image.units if self.task else b"",
        )
        self.crew.ask(order, ImageReady, patience_s)
        before = read_times()
        done = self.crew.ask(StartCast(), CastFinished, patience_s)
        used = read_times().since(before)
        digests = self.crew.ask(ReportDigest(), DigestReport, patience_s)
        wrong = [rank for rank, checked in enumerate(digests) if checked.digest != image.digest]
        if wrong:
            raise DigestMismatch(f"{self.title}: ranks {wrong} hold other bytes than were cast")
        return to_cast_run(done, self.sources, used, sum(checked.cpu_s for checked in digests))


def to_cast_run(
    done: Sequence[CastFinished], sources: int, used: ProcessorTimes, own_cpu_s: float
) -> CastRun:
    """Convert the processes' reports to times since the first start (pure)."""
    started_s = min(one.started_s for one in done)
    targets = done[sources:]
    return CastRun(
        complete_s=tuple(one.ended_s - started_s for one in targets),
        used=used,
        own_cpu_s=own_cpu_s,
        arrived_s=tuple(
            tuple(moment - started_s for moment in one.arrived_s) for one in targets if one.arrived_s
        ),
        transports=sum_counts(one.transports for one in targets),
        faults=sum_counts(one.faults for one in targets),
    )


def sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
