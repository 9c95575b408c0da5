"""Loads of a function, one after the other, that are served meanwhile, and of whose nodes some are killed."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.chaos_check import Findings, final_books
from benchmarks.chaos_cluster import Cluster
from benchmarks.live_serving_check import last_members, pipelines_of, wrong_answers, wrong_rows
from benchmarks.live_serving_client import Answer, Caller, Work, crowd, draw_works
from benchmarks.live_serving_cluster import NotThere, Stage, until

_LONGEST_LOAD_S = 300.0
_QUIET_S = 60.0
_POLL_S = 0.05
_TRIES = 3
_AT_ONCE = 16  # where one node answers alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One load: `sources` nodes hold the image, `loading` others get it, `requests` are under way. Long
    requests outlast the load, so that they switch; short ones end before. `kills` nodes that serve in a
    pipeline are killed, each after a random number of tokens."""

    family: str
    sources: int
    loading: int
    requests: int
    long: bool
    kills: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One node that was killed: its place in a pipeline, and what came until then."""

    node: str
    place: int
    stages: int
    is_head: bool
    load_s: float  # since the load began
    calls: int  # under way on all nodes
    tokens: int  # that came since the load began


@dataclass(slots=True, kw_only=True)
class Round:
    """What came of one scene."""

    scene: Scene
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    first_live_s: float | None = None
    moves: int = 0
    ready_s: list[float] = field(default_factory=list)


class Serving:
    """Functions of each family on a platform that is up."""

    def __init__(self, cluster: Cluster, http: httpx2.AsyncClient, seed: int, findings: Findings) -> None:
        self.cluster = cluster
        self.stage = Stage(http)
        self.caller = Caller(http)
        self.findings = findings
        self.expected: dict[tuple[str, Work], list[int]] = {}
        self.rounds: list[Round] = []
        self.killed: set[str] = set()  # instances
        self._chance = random.Random(seed)
        self._seed = seed
        self._works: dict[tuple[str, bool], list[Work]] = {}

    async def deploy(self, family: str, model: Path, tokens: Mapping[bool, tuple[int, int]]) -> None:
        """Deploy a function, and learn from one node what its requests give."""
        limits = ("--max-instances", str(len(self.cluster.nodes)), "--target-concurrency", "16")
        arguments = ("--name", family, "--dtype", "float32", "--live", "pipeline", "--keep-alive", "10m")
        await asyncio.to_thread(self.cluster.command, "deploy", str(model), *arguments, *limits)
        await self.stage.scale(family, 1, wait=True)
        for long, bounds in tokens.items():
            works = draw_works(random.Random(f"{self._seed} {family} {long}"), 64, bounds)
            self._works[family, long] = works
            for first in range(0, len(works), _AT_ONCE):
                batch = works[first : first + _AT_ONCE]
                await asyncio.gather(*(self._learn(family, work) for work in batch))
        await self.stage.asleep(family)

    async def _learn(self, family: str, work: Work) -> None:
        for _ in range(_TRIES):
            answer = await self.caller.ask(family, work)
            if not answer.failure:
                self.expected[family, work] = answer.ids
                return
        raise NotThere(f"one node alone fails: {answer}: {answer.failure}")

    async def play(self, scene: Scene) -> Round:
        """One load, with what is asked meanwhile. Raises NotThere."""
        family, names = scene.family, [part.name for part in self.cluster.nodes]
        self._chance.shuffle(names)
        sources, cold = names[: scene.sources], names[scene.sources : scene.sources + scene.loading]
        await self.stage.held_by(family, sources)
        round_ = Round(scene=scene)
        self.rounds.append(round_)
        before, began_s = len(self.caller.answers), time.monotonic()
        moves = await self.stage.counter("hypercast_live_moves_total")
        works = self._chance.sample(self._works[family, scene.long], 64)
        over = asyncio.Event()
        await self.stage.scale(family, scene.loading, cold, wait=False)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(crowd(self.caller, family, works, scene.requests, over))
            killing = group.create_task(self._kill_some(round_, began_s))
            try:
                await self._until_ready(round_, cold, began_s)
            finally:
                over.set()
                killing.cancel()
            with suppress(asyncio.CancelledError):
                await killing
            async with asyncio.timeout(_LONGEST_LOAD_S):
                await asking
        round_.seconds = time.monotonic() - began_s
        round_.answers = self.caller.answers[before:]
        round_.moves = int(await self.stage.counter("hypercast_live_moves_total") - moves)
        live = [one.arrived_s[0] for one in round_.answers if one.start_kind == "live" and one.arrived_s]
        round_.first_live_s = min(live) - began_s if live else None
        self.findings.add(wrong_answers(round_.answers, self.expected))
        return round_

    async def _until_ready(self, round_: Round, cold: Sequence[str], began_s: float) -> None:
        ready: set[str] = set()

        async def all_ready() -> bool:
            states = await self.stage.states(round_.scene.family)
            ready.clear()
            ready.update(node for node, state in states.items() if state == "ready")
            while len(round_.ready_s) < len(ready):
                round_.ready_s.append(round(time.monotonic() - began_s, 3))
            return ready >= set(cold)

        await until(f"{', '.join(cold)} are ready", all_ready, _LONGEST_LOAD_S)

    async def _kill_some(self, round_: Round, began_s: float) -> None:
        scene, came = round_.scene, self.caller.came
        while len(round_.kills) < scene.kills:
            await self.caller.tokens(self._chance.randint(1, 4 * scene.requests))
            found = await self._victim(scene.family)
            if found is None:
                await asyncio.sleep(_POLL_S)
                continue
            node, instance, place, stages, is_head = found
            part = next(part for part in self.cluster.nodes if part.name == node)
            if self.cluster.kill(part) is None:
                continue
            self.killed.add(instance)
            kill = Kill(
                node=node,
                place=place,
                stages=stages,
                is_head=is_head,
                load_s=round(time.monotonic() - began_s, 3),
                calls=scene.requests,
                tokens=self.caller.came - came,
            )
            round_.kills.append(kill)

    async def _victim(self, family: str) -> tuple[str, str, int, int, bool] | None:
        """A stage of a pipeline that serves, whose node still loads."""
        states = await self.stage.states(family)
        found = [
            (
                str(stage["node"]),
                str(stage["instance_id"]),
                place,
                len(pipeline["stages"]),
                place == pipeline["head"],
            )
            for pipeline in await self.stage.pipelines(family)
            for place, stage in enumerate(pipeline["stages"])
            if states.get(stage["node"]) == "loading"
        ]
        return self._chance.choice(found) if found else None


async def close_books(serving: Serving) -> dict[str, Any]:
    """Check the ledger once all is asleep; returns what is told of it."""
    for family in sorted({round_.scene.family for round_ in serving.rounds}):
        await serving.stage.asleep(family)
    books = await final_books(serving.cluster, _QUIET_S)
    balance = books.conservation()
    serving.findings.add(str(balance).splitlines())
    alone = {
        answer.request_id
        for round_ in serving.rounds
        if round_.scene.sources == 1
        for answer in round_.answers
    }
    serving.findings.add(wrong_rows(serving.caller.answers, books.records, serving.killed, alone))
    piped = [row for row in books.records if pipelines_of(row)]
    return {
        "rows": len(books.records),
        "by_pipelines": len(piped),
        "paid_members": sum(len(last_members(row, serving.killed)) for row in piped),
        "lost_calls": len(books.lost),
        "busy_us": sum(one.busy_us for one in balance.instances),
        "used_us": sum(one.used_us for one in balance.instances),
        "lost_us": sum(one.lost_us for one in balance.instances),
        "verdict": str(balance.verdict),
    }


def show(round_: Round) -> str:
    """One line for people."""
    scene = round_.scene
    live = sum(answer.start_kind == "live" for answer in round_.answers)
    first = (
        "no pipeline" if round_.first_live_s is None else f"first live token at {round_.first_live_s:.1f} s"
    )
    ready = round_.ready_s[-1] if round_.ready_s else 0.0
    return (
        f"{scene.family:6} k={scene.sources} {'long ' if scene.long else 'short'} "
        f"{len(round_.answers):4} requests, {live:4} live, {round_.moves:3} moved, "
        f"{len(round_.kills)} kills; "
        f"{first}, all ready at {ready:.1f} s, {round_.seconds:.1f} s"
    )
