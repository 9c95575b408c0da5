"""Loads of a function, one after another, that serve requests meanwhile, with kills of nodes."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.chaos.check import Findings, wait_for_ledger
from benchmarks.harness.admin_client import AdminClient, until
from benchmarks.harness.local_platform import LocalPlatform, PlatformStateError
from benchmarks.live_serving.check import last_members, pipelines_of, wrong_answers, wrong_rows
from benchmarks.live_serving.client import LiveAnswer, LiveClient, LiveRequest, draw_requests, run_clients

_MAX_LOAD_S = 300.0
_QUIET_S = 60.0
_POLL_S = 0.05
_ATTEMPTS = 3
_CONCURRENCY = 16  # of requests to one node


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadScenario:
    """One load: `sources` nodes hold the image, `loading` others receive it, `requests` are in flight.

    Long requests outlast the load, so that they move; short ones end before. `kills` nodes that serve in a
    pipeline are killed, each after a random number of tokens.
    """

    family: str
    sources: int
    loading: int
    requests: int
    long: bool
    kills: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKill:
    """One killed node: its place in a pipeline, and the progress until then."""

    node: str
    place: int
    stages: int
    is_head: bool
    load_s: float  # since the load started
    calls: int  # in flight on all nodes
    tokens: int  # received since the load started


@dataclass(slots=True, kw_only=True)
class LoadRound:
    """The result of one scenario."""

    scenario: LoadScenario
    seconds: float = 0.0
    answers: list[LiveAnswer] = field(default_factory=list)
    kills: list[StageKill] = field(default_factory=list)
    first_live_s: float | None = None
    moves: int = 0
    ready_s: list[float] = field(default_factory=list)


class LiveServingRun:
    """Functions of each family on a started platform."""

    def __init__(
        self, platform: LocalPlatform, http: httpx2.AsyncClient, seed: int, findings: Findings
    ) -> None:
        self.platform = platform
        self.admin = AdminClient(http)
        self.client = LiveClient(http)
        self.findings = findings
        self.expected: dict[tuple[str, LiveRequest], list[int]] = {}
        self.rounds: list[LoadRound] = []
        self.killed: set[str] = set()  # instances
        self._chance = random.Random(seed)
        self._seed = seed
        self._works: dict[tuple[str, bool], list[LiveRequest]] = {}

    async def deploy(self, family: str, model: Path, tokens: Mapping[bool, tuple[int, int]]) -> None:
        """Deploy a function, and record one node's responses to its requests."""
        limits = ("--max-instances", str(len(self.platform.nodes)), "--target-concurrency", "16")
        arguments = ("--name", family, "--dtype", "float32", "--live", "pipeline", "--keep-alive", "10m")
        await asyncio.to_thread(self.platform.command, "deploy", str(model), *arguments, *limits)
        await self.admin.scale(family, 1, wait=True)
        for long, bounds in tokens.items():
            works = draw_requests(random.Random(f"{self._seed} {family} {long}"), 64, bounds)
            self._works[family, long] = works
            for first in range(0, len(works), _CONCURRENCY):
                batch = works[first : first + _CONCURRENCY]
                await asyncio.gather(*(self._record_expected(family, work) for work in batch))
        await self.admin.scale_to_zero(family)

    async def _record_expected(self, family: str, work: LiveRequest) -> None:
        for _ in range(_ATTEMPTS):
            answer = await self.client.ask(family, work)
            if not answer.failure:
                self.expected[family, work] = answer.ids
                return
        raise PlatformStateError(f"a request to one node failed: {answer}: {answer.failure}")

    async def run_scenario(self, scenario: LoadScenario) -> LoadRound:
        """Run one load with its requests. Raises PlatformStateError."""
        family, names = scenario.family, [node.name for node in self.platform.nodes]
        self._chance.shuffle(names)
        sources = names[: scenario.sources]
        cold = names[scenario.sources : scenario.sources + scenario.loading]
        await self.admin.place_image(family, sources)
        round_ = LoadRound(scenario=scenario)
        self.rounds.append(round_)
        before, started_s = len(self.client.answers), time.monotonic()
        moves = await self.admin.counter("hypercast_live_moves_total")
        works = self._chance.sample(self._works[family, scenario.long], 64)
        over = asyncio.Event()
        await self.admin.scale(family, scenario.loading, cold, wait=False)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(run_clients(self.client, family, works, scenario.requests, over))
            killing = group.create_task(self._kill_some(round_, started_s))
            try:
                await self._until_ready(round_, cold, started_s)
            finally:
                over.set()
                killing.cancel()
            with suppress(asyncio.CancelledError):
                await killing
            async with asyncio.timeout(_MAX_LOAD_S):
                await asking
        round_.seconds = time.monotonic() - started_s
        round_.answers = self.client.answers[before:]
        round_.moves = int(await self.admin.counter("hypercast_live_moves_total") - moves)
        live = [one.arrived_s[0] for one in round_.answers if one.start_kind == "live" and one.arrived_s]
        round_.first_live_s = min(live) - started_s if live else None
        self.findings.add(wrong_answers(round_.answers, self.expected))
        return round_

    async def _until_ready(self, round_: LoadRound, cold: Sequence[str], started_s: float) -> None:
        ready: set[str] = set()

        async def all_ready() -> bool:
            states = await self.admin.states(round_.scenario.family)
            ready.clear()
            ready.update(node for node, state in states.items() if state == "ready")
            while len(round_.ready_s) < len(ready):
                round_.ready_s.append(round(time.monotonic() - started_s, 3))
            return ready >= set(cold)

        await until(f"{', '.join(cold)} are ready", all_ready, _MAX_LOAD_S)

    async def _kill_some(self, round_: LoadRound, started_s: float) -> None:
        scenario, tokens_before = round_.scenario, self.client.token_count
        while len(round_.kills) < scenario.kills:
            await self.client.tokens(self._chance.randint(1, 4 * scenario.requests))
            found = await self._victim(scenario.family)
            if found is None:
                await asyncio.sleep(_POLL_S)
                continue
            node, instance, place, stages, is_head = found
            if self.platform.kill(next(one for one in self.platform.nodes if one.name == node)) is None:
                continue
            self.killed.add(instance)
            kill = StageKill(
                node=node,
                place=place,
                stages=stages,
                is_head=is_head,
                load_s=round(time.monotonic() - started_s, 3),
                calls=scenario.requests,
                tokens=self.client.token_count - tokens_before,
            )
            round_.kills.append(kill)

    async def _victim(self, family: str) -> tuple[str, str, int, int, bool] | None:
        """Choose a stage of a serving pipeline on a node that is still loading."""
        states = await self.admin.states(family)
        found = [
            (str(stage["node"]), str(stage["instance_id"]), place, len(stages), place == pipeline["head"])
            for pipeline in await self.admin.pipelines(family)
            for stages in [pipeline["stages"]]
            for place, stage in enumerate(stages)
            if states.get(stage["node"]) == "loading"
        ]
        return self._chance.choice(found) if found else None


async def check_ledger(serving: LiveServingRun) -> dict[str, Any]:
    """Check the ledger with all functions at zero instances; return its summary."""
    for family in sorted({round_.scenario.family for round_ in serving.rounds}):
        await serving.admin.scale_to_zero(family)
    books = await wait_for_ledger(serving.platform, _QUIET_S)
    balance = books.reconcile()
    serving.findings.add(str(balance).splitlines())
    of_one = [round_ for round_ in serving.rounds if round_.scenario.sources == 1]
    alone = {answer.request_id for round_ in of_one for answer in round_.answers}
    serving.findings.add(wrong_rows(serving.client.answers, books.records, serving.killed, alone))
    piped = [row for row in books.records if pipelines_of(row)]
    return {
        **books.summary(balance),
        "by_pipelines": len(piped),
        "paid_members": sum(len(last_members(row, serving.killed)) for row in piped),
    }


def show(round_: LoadRound) -> str:
    """Format a round as one line."""
    scenario = round_.scenario
    live = sum(answer.start_kind == "live" for answer in round_.answers)
    at_s = round_.first_live_s
    first = "no pipeline" if at_s is None else f"first live token at {at_s:.1f} s"
    ready = round_.ready_s[-1] if round_.ready_s else 0.0
    return (
        f"{scenario.family:6} k={scenario.sources} {'long ' if scenario.long else 'short'} "
        f"{len(round_.answers):4} requests, {live:4} live, {round_.moves:3} moved, "
        f"{len(round_.kills)} kills; "
        f"{first}, all ready at {ready:.1f} s, {round_.seconds:.1f} s"
    )
