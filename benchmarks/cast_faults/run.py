"""Runs the casts of a cast-faults benchmark and verifies each."""

import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cast_faults.fleet import Fleet
from benchmarks.cast_faults.messages import (
    CastJoined,
    CastLeft,
    FaultCastFinished,
    FaultTask,
    JoinCast,
    LeaveCast,
    RunCast,
)
from benchmarks.cast_faults.trials import CastVariant, FaultKind, FaultTrial, InjectedFault
from benchmarks.harness.crew import CrewError
from benchmarks.harness.processor import read_times
from benchmarks.multicast.run import CastImage, sum_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """What is equal in all casts; `images` is a folder in shared memory."""

    image: CastImage
    blocks: int
    sources: int
    images: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReturn:
    """A killed node that returned: the blocks it kept, the bytes it pulled then, and the time."""

    kept_blocks: int
    pulled_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of a cast; times count from its start.

    `seconds` until the last survivor held the image, `struck_s` until the fault; `processors` is the
    machine's CPU share; `found` and `missed` count damaged blocks, `faults` failed pulls by kind. `wrong`
    lists findings.
    """

    trial: FaultTrial
    seconds: float
    struck_s: float | None
    processors: float
    found: int
    missed: int
    faults: Mapping[str, int]
    returned: NodeReturn | None
    wrong: tuple[str, ...]

    @property
    def was_hit(self) -> bool:
        """Whether the cast was in progress at its fault: a quick one may have ended before."""
        return self.struck_s is not None and self.struck_s < self.seconds


@dataclass(slots=True)
class Baseline:
    """The durations of undisturbed casts by variant."""

    seconds: dict[CastVariant, list[float]] = field(default_factory=dict)

    def add(self, outcome: TrialResult) -> None:
        if outcome.trial.is_undisturbed:
            self.seconds.setdefault(outcome.trial.shape, []).append(outcome.seconds)

    def median_s(self, shape: CastVariant) -> float:
        return statistics.median(self.seconds[shape])

    def lost_share(self, outcome: TrialResult) -> float:
        """Return how much longer it took than undisturbed, as a fraction of that."""
        return outcome.seconds / self.median_s(outcome.trial.shape) - 1


class FaultRun:
    """Casts among the nodes of a fleet, one after another."""

    def __init__(self, fleet: Fleet, setup: RunSetup) -> None:
        self._fleet = fleet
        self._setup = setup
        self.baseline = Baseline()

    def __repr__(self) -> str:
        return f"FaultRun({self._fleet!r}, {self._setup.image.nbytes} bytes)"

    async def cast(self, trial: FaultTrial) -> TrialResult:
        """Run one trial. Raises CrewError if no process can be started any more."""
        one = _CastExecution(trial, self._task(trial), self._fleet, self._setup.images)
        outcome = await one.run(self.baseline)
        self.baseline.add(outcome)
        return outcome

    def _task(self, trial: FaultTrial) -> FaultTask:
        image, setup = self._setup.image, self._setup
        return FaultTask(
            cast=trial.name,
            nbytes=image.nbytes,
            seed=image.seed,
            units=image.units,
            blocks=setup.blocks,
            urls=[node.url for node in self._fleet.nodes],
            sources=setup.sources,
            planner=trial.shape.planner,
            transport=trial.shape.transport,
            damage=trial.damage,
            digest=image.digest,
        )


class _CastExecution:
    def __init__(self, trial: FaultTrial, task: FaultTask, fleet: Fleet, images: Path) -> None:
        self._trial = trial
        self._task = task
        self._fleet = fleet
        self._images = images
        self._wrong: list[str] = []
        self._failed: set[int] = set()  # ranks with a failed process
        self._done: dict[int, FaultCastFinished] = {}
        self._began_s = 0.0
        self._struck_s: float | None = None
        self._return: asyncio.Task[NodeReturn | None] | None = None

    async def run(self, baseline: Baseline) -> TrialResult:
        await asyncio.gather(*(self._hold(rank) for rank in range(len(self._task.urls))))
        before = read_times()
        self._began_s = time.monotonic()
        going = {rank: asyncio.create_task(self._go(rank)) for rank in self._alive()}
        try:
            if self._trial.strike is not None:
                await self._strike(self._trial.strike, baseline, going)
            await asyncio.gather(*going.values())
            used = read_times().since(before)
            returned = await self._return if self._return is not None else None
        finally:
            for task in going.values():
                task.cancel()
        await self._clean_up()
        return self._outcome(used.share, returned)

    def _alive(self) -> list[int]:
        return [rank for rank in range(len(self._task.urls)) if rank not in self._failed]

    def _is_struck(self, rank: int) -> bool:
        return self._trial.strike is not None and self._trial.strike.rank == rank

    def _path(self, rank: int) -> Path:
        return self._images / f"image-{rank}"

    async def _hold(self, rank: int) -> None:
        order = JoinCast(rank=rank, path=str(self._path(rank)), task=self._task)
        try:
            await self._fleet.nodes[rank].ask(order, CastJoined)
        except CrewError as error:
            self._mark_failed(rank, error)

    async def _go(self, rank: int) -> None:
        try:
            self._done[rank] = await self._fleet.nodes[rank].ask(RunCast(), FaultCastFinished)
        except CrewError as error:
            self._mark_failed(rank, error)

    async def _strike(
        self, strike: InjectedFault, baseline: Baseline, going: dict[int, "asyncio.Task[None]"]
    ) -> None:
        at_s = self._began_s + strike.at * baseline.median_s(self._trial.shape)
        await asyncio.sleep(at_s - time.monotonic())
        struck = self._fleet.nodes[strike.rank]
        going.pop(strike.rank).cancel()
        self._struck_s = time.monotonic() - self._began_s
        if strike.fault is FaultKind.HANG:
            struck.stop()
            self._failed.add(strike.rank)
            return
        await struck.kill()
        if strike.returns:
            self._return = asyncio.create_task(self._restart(strike.rank))
        else:
            self._failed.add(strike.rank)

    async def _restart(self, rank: int) -> NodeReturn | None:
        """Return the node with its kept content, as a new process at the same address."""
        started_s = time.monotonic()
        try:
            node = await self._fleet.replace(rank, same_place=True)
            order = JoinCast(rank=rank, path=str(self._path(rank)), task=self._task, kept=True)
            kept = await node.ask(order, CastJoined)
            done = await node.ask(RunCast(), FaultCastFinished)
        except CrewError as error:
            self._mark_failed(rank, error)
            return None
        self._done[rank] = done
        return NodeReturn(
            kept_blocks=kept.blocks, pulled_bytes=done.nbytes, seconds=time.monotonic() - started_s
        )

    def _mark_failed(self, rank: int, error: CrewError) -> None:
        self._wrong.append(f"node {rank}: {error}")
        self._failed.add(rank)

    async def _clean_up(self) -> None:
        """Compare all nodes' bytes, check for leaks, and refill all places. Raises CrewError."""
        for rank in sorted(self._failed):
            await self._fleet.nodes[rank].kill()
        await asyncio.gather(*(self._end(rank) for rank in self._alive()))
        await asyncio.gather(*(self._count(rank) for rank in self._alive()))
        for rank in sorted(self._failed):
            await self._fleet.nodes[rank].kill()
            self._path(rank).unlink(missing_ok=True)
            await self._fleet.ensure_spare()
            await self._fleet.replace(rank)
        await self._fleet.ensure_spare()
        self._wrong += [f"{path.name} remains in shared memory" for path in self._images.iterdir()]

    async def _end(self, rank: int) -> None:
        try:
            ended = await self._fleet.nodes[rank].ask(LeaveCast(), CastLeft)
        except CrewError as error:
            self._mark_failed(rank, error)
            return
        if ended.digest != self._task.digest:
            self._wrong.append(f"node {rank}: its bytes differ from the image")

    async def _count(self, rank: int) -> None:
        try:
            leaks = await self._fleet.nodes[rank].leaks()
        except CrewError as error:
            self._mark_failed(rank, error)
            return
        if leaks:
            self._wrong.append(f"node {rank}: leaked {leaks}")

    def _outcome(self, processors: float, returned: NodeReturn | None) -> TrialResult:
        survivors = [done for rank, done in self._done.items() if not self._is_struck(rank)]
        for rank, done in self._done.items():
            declared_lost = {name: why for name, why in done.lost.items() if not self._is_struck(int(name))}
            self._wrong += [
                f"node {rank} declared {name} lost, which survived: {why}"
                for name, why in declared_lost.items()
            ]
            self._wrong += [f"node {rank} missed {done.missed} damaged blocks"] if done.missed else []
        return TrialResult(
            trial=self._trial,
            seconds=max((done.ended_s for done in survivors), default=self._began_s) - self._began_s,
            struck_s=self._struck_s,
            processors=processors,
            found=sum(done.found for done in self._done.values()),
            missed=sum(done.missed for done in self._done.values()),
            faults=sum_counts(done.faults for done in survivors),
            returned=returned,
            wrong=tuple(self._wrong),
        )
