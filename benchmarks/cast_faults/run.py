"""Carries out the casts of a benchmark of faults, and judges what came of each."""

import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cast_faults_draw import Fault, Shape, Strike, Trial
from benchmarks.cast_faults_fleet import Fleet
from benchmarks.cast_faults_messages import CastTask, Done, End, Ended, Go, Hold, Holding
from benchmarks.crew import CrewError
from benchmarks.multicast_run import CastImage, added
from benchmarks.processor import read_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is the same in all casts; `images` is a folder in memory."""

    image: CastImage
    blocks: int
    sources: int
    images: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """A killed node that came back: what it had kept, what it pulled then, and in which time."""

    kept_blocks: int
    pulled_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a cast; times count from its begin.

    `seconds` until the last of those that lived held everything, `struck_s` until the strike; `processors`
    is the share of the machine's that was busy; `found` and `missed` count damaged blocks, `faults` pulls
    by what went wrong. `wrong` is what must not be, in words.
    """

    trial: Trial
    seconds: float
    struck_s: float | None
    processors: float
    found: int
    missed: int
    faults: Mapping[str, int]
    returned: Return | None
    wrong: tuple[str, ...]

    @property
    def was_struck(self) -> bool:
        """Whether it was under way when its node was struck: a quick one may have ended before."""
        return self.struck_s is not None and self.struck_s < self.seconds


@dataclass(slots=True)
class Baseline:
    """How long undisturbed casts of each shape took."""

    seconds: dict[Shape, list[float]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        if outcome.trial.is_undisturbed:
            self.seconds.setdefault(outcome.trial.shape, []).append(outcome.seconds)

    def median_s(self, shape: Shape) -> float:
        return statistics.median(self.seconds[shape])

    def lost_share(self, outcome: Outcome) -> float:
        """How much longer it took than undisturbed, as a share of that."""
        return outcome.seconds / self.median_s(outcome.trial.shape) - 1


class FaultRun:
    """Casts among the nodes of a fleet, one after another."""

    def __init__(self, fleet: Fleet, setup: Setup) -> None:
        self._fleet = fleet
        self._setup = setup
        self.baseline = Baseline()

    def __repr__(self) -> str:
        return f"FaultRun({self._fleet!r}, {self._setup.image.nbytes} bytes)"

    async def cast(self, trial: Trial) -> Outcome:
        """Raises CrewError if no process can be had any more."""
        one = _OneCast(trial, self._task(trial), self._fleet, self._setup.images)
        outcome = await one.run(self.baseline)
        self.baseline.add(outcome)
        return outcome

    def _task(self, trial: Trial) -> CastTask:
        image, setup = self._setup.image, self._setup
        return CastTask(
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


class _OneCast:
    def __init__(self, trial: Trial, task: CastTask, fleet: Fleet, images: Path) -> None:
        self._trial = trial
        self._task = task
        self._fleet = fleet
        self._images = images
        self._wrong: list[str] = []
        self._dead: set[int] = set()  # ranks whose process is of no use any more
        self._done: dict[int, Done] = {}
        self._began_s = 0.0
        self._struck_s: float | None = None
        self._return: asyncio.Task[Return | None] | None = None

    async def run(self, baseline: Baseline) -> Outcome:
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
        return [rank for rank in range(len(self._task.urls)) if rank not in self._dead]

    def _is_struck(self, rank: int) -> bool:
        return self._trial.strike is not None and self._trial.strike.rank == rank

    def _path(self, rank: int) -> Path:
        return self._images / f"image-{rank}"

    async def _hold(self, rank: int) -> None:
        order = Hold(rank=rank, path=str(self._path(rank)), task=self._task)
        try:
            await self._fleet.nodes[rank].ask(order, Holding)
        except CrewError as error:
            self._broken(rank, error)

    async def _go(self, rank: int) -> None:
        try:
            self._done[rank] = await self._fleet.nodes[rank].ask(Go(), Done)
        except CrewError as error:
            self._broken(rank, error)

    async def _strike(
        self, strike: Strike, baseline: Baseline, going: dict[int, "asyncio.Task[None]"]
    ) -> None:
        at_s = self._began_s + strike.at * baseline.median_s(self._trial.shape)
        await asyncio.sleep(at_s - time.monotonic())
        struck = self._fleet.nodes[strike.rank]
        going.pop(strike.rank).cancel()
        self._struck_s = time.monotonic() - self._began_s
        if strike.fault is Fault.HANG:
            struck.stop()
            self._dead.add(strike.rank)
            return
        await struck.kill()
        if strike.returns:
            self._return = asyncio.create_task(self._come_back(strike.rank))
        else:
            self._dead.add(strike.rank)

    async def _come_back(self, rank: int) -> Return | None:
        """With what it kept, as a new process at the same address."""
        began_s = time.monotonic()
        try:
            node = await self._fleet.replace(rank, same_place=True)
            order = Hold(rank=rank, path=str(self._path(rank)), task=self._task, kept=True)
            kept = await node.ask(order, Holding)
            done = await node.ask(Go(), Done)
        except CrewError as error:
            self._broken(rank, error)
            return None
        self._done[rank] = done
        return Return(kept_blocks=kept.blocks, pulled_bytes=done.nbytes, seconds=time.monotonic() - began_s)

    def _broken(self, rank: int, error: CrewError) -> None:
        self._wrong.append(f"node {rank}: {error}")
        self._dead.add(rank)

    async def _clean_up(self) -> None:
        """Compare what all hold, have nothing left of the cast, and all places taken. Raises CrewError."""
        for rank in sorted(self._dead):
            await self._fleet.nodes[rank].kill()
        await asyncio.gather(*(self._end(rank) for rank in self._alive()))
        await asyncio.gather(*(self._count(rank) for rank in self._alive()))
        for rank in sorted(self._dead):
            await self._fleet.nodes[rank].kill()
            self._path(rank).unlink(missing_ok=True)
            await self._fleet.have_spare()
            await self._fleet.replace(rank)
        await self._fleet.have_spare()
        self._wrong += [f"{path.name} is left in shared memory" for path in self._images.iterdir()]

    async def _end(self, rank: int) -> None:
        try:
            ended = await self._fleet.nodes[rank].ask(End(), Ended)
        except CrewError as error:
            self._broken(rank, error)
            return
        if ended.digest != self._task.digest:
            self._wrong.append(f"node {rank}: its bytes are not those that were cast")

    async def _count(self, rank: int) -> None:
        try:
            leaked = await self._fleet.nodes[rank].leaked()
        except CrewError as error:
            self._broken(rank, error)
            return
        if leaked:
            self._wrong.append(f"node {rank}: leaked {leaked}")

    def _outcome(self, processors: float, returned: Return | None) -> Outcome:
        survivors = [done for rank, done in self._done.items() if not self._is_struck(rank)]
        for rank, done in self._done.items():
            given_up = {name: why for name, why in done.lost.items() if not self._is_struck(int(name))}
            self._wrong += [
                f"node {rank} gave up {name}, which lived: {why}" for name, why in given_up.items()
            ]
            self._wrong += [f"node {rank} passed over {done.missed} damaged blocks"] if done.missed else []
        return Outcome(
            trial=self._trial,
            seconds=max((done.ended_s for done in survivors), default=self._began_s) - self._began_s,
            struck_s=self._struck_s,
            processors=processors,
            found=sum(done.found for done in self._done.values()),
            missed=sum(done.missed for done in self._done.values()),
            faults=added(done.faults for done in survivors),
            returned=returned,
            wrong=tuple(self._wrong),
        )
