"""One run of random kills on a platform under load, with its checks."""

import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.check import (
    Findings,
    Outage,
    ledger_mismatches,
    wait_for_ledger,
    wrong_answers,
    wrong_sums,
)
from benchmarks.chaos.load import ECHO, HANDLER, MODEL, ChaosLoad, RequestFate
from benchmarks.harness.local_platform import Component, ComponentKind, LocalPlatform, running_platform
from benchmarks.harness.processes import ROOT
from registry.errors import StateUnavailable
from registry.redis.state import RedisState

_TIMEOUT_S = 60.0
_JUDGE_EVERY = 10  # kills
# Kills by kind in one pass: rare failures are rare, but occur in each run.
_DECK = Counter(
    {
        ComponentKind.GATEWAY: 6,
        ComponentKind.NODE: 7,
        ComponentKind.REDIS: 6,
        ComponentKind.HANDLER: 3,
        ComponentKind.ZYGOTE: 2,
        ComponentKind.SUPERVISOR: 1,
    }
)
_PLAIN = (
    ComponentKind.GATEWAY,
    ComponentKind.NODE,
    ComponentKind.REDIS,
)  # kinds of which two are sometimes killed at once
_TWO_AT_ONCE = 0.1
_QUIET_S = 90.0
_TENANTS = ("acme", "bolt", "cube")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentKill:
    """One kill: the time until the restart, and from there to a correct response."""

    component: Component
    at_s: float
    restart_s: float
    recovery_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPlan:
    """What a run does: a number of kills, or kills for a number of seconds.

    Kinds in `first` are killed first and those in `last` at the end, even if spared; between them `deck` is
    shuffled repeatedly, without the components in `spared`. The pause before a kill is uniform in `pause_s`.
    `limit_s` is a client's timeout, `recovery_s` the allowed time from a restart to a correct response.
    """

    seed: int
    kills: int = 0
    seconds: float = 0.0
    clients: int = 8
    tokens: int = 96
    pause_s: tuple[float, float] = (0.0, 0.6)
    spared: frozenset[Component] = frozenset()
    deck: Counter[ComponentKind] = field(default_factory=_DECK.copy)
    first: tuple[ComponentKind, ...] = ()
    last: tuple[ComponentKind, ...] = ()
    limit_s: float = 15.0
    recovery_s: float = 5.0


@dataclass(slots=True)
class ChaosRun:
    """One run on a started platform."""

    platform: LocalPlatform
    load: ChaosLoad
    plan: KillPlan
    chance: random.Random
    findings: Findings
    kills: list[ComponentKill] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    judged: int = 0
    judgements: int = 0
    cards: list[ComponentKind] = field(default_factory=list)

    async def kill_next(self, kind: ComponentKind | None = None) -> None:
        """Kill one or two components, and wait until the service responds through every gateway."""
        await asyncio.sleep(self.chance.uniform(*self.plan.pause_s))
        if kind is None:
            victims = self._victims()
        else:
            victims = [self.chance.choice([one for one in self.platform.components if one.kind is kind])]
        async with asyncio.TaskGroup() as group:
            for component in victims:
                group.create_task(self._kill(component))

    def _victims(self) -> list[Component]:
        components = [one for one in self.platform.components if one not in self.plan.spared]
        kind = self._draw(components)
        first = self.chance.choice([component for component in components if component.kind is kind])
        others = [component for component in components if component.kind in _PLAIN and component != first]
        two = first.kind in _PLAIN and self.chance.random() < _TWO_AT_ONCE
        return [first, self.chance.choice(others)] if two and others else [first]

    def _draw(self, components: Sequence[Component]) -> ComponentKind:
        """Draw the kind of the next kill; each kind once first, so that short runs have all."""
        if not self.cards:
            there = {component.kind for component in components}
            each = [kind for kind in self.plan.deck if kind in there]
            more = [kind for kind in (self.plan.deck - Counter(each)).elements() if kind in each]
            self.chance.shuffle(each)
            self.chance.shuffle(more)
            self.cards = [*more, *each]
        return self.cards.pop()

    async def _kill(self, component: Component) -> None:
        if component.kind is ComponentKind.HANDLER:
            await self._first_good_answer(0, "handler")  # starts one
        at_s = time.monotonic()
        before = self.platform.kill(component)
        if before is None:
            return  # not started yet
        restart_s = await self.platform.restarted(component, before, _TIMEOUT_S)
        if restart_s is None:
            self.findings.add([f"{component.name} was not restarted within {_TIMEOUT_S:g} s"])
            return
        is_gateway = component.kind is ComponentKind.GATEWAY
        through = [self.platform.gateways.index(component)] if is_gateway else None
        work = "handler" if component.kind is ComponentKind.HANDLER else "whole"
        recovery_s = await self._answering(restart_s, through, work)
        since = f"the restart of {component.name}"
        if recovery_s is None:
            self.findings.add([f"no correct response within {_TIMEOUT_S:g} s of {since}"])
        elif recovery_s > self.plan.recovery_s:
            self.findings.add([f"{recovery_s:.2f} s from {since} to a correct response"])
        self.outages.append(Outage(component=component, from_s=at_s, to_s=time.monotonic()))
        self.kills.append(
            ComponentKill(
                component=component,
                at_s=at_s,
                restart_s=restart_s - at_s,
                recovery_s=recovery_s or _TIMEOUT_S,
            )
        )

    async def _answering(self, since_s: float, through: Sequence[int] | None, work: str) -> float | None:
        """Return the seconds until responses were correct through each of these gateways (default: all)."""
        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(self._first_good_answer(index, work))
                for index in (range(len(self.platform.gateways)) if through is None else through)
            ]
        ends = [task.result() for task in asking]
        return None if None in ends else max(0.0, max(end for end in ends if end is not None) - since_s)

    async def _first_good_answer(self, gateway: int, work: str) -> float | None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline_s:
            if await self.load.probe(gateway, work):
                return time.monotonic()
            await asyncio.sleep(0.05)
        return None

    def progress(self) -> str:
        """Return a progress line."""
        fates = Counter(one.fate for one in self.load.issued)
        fates_text = ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
        last = f" (latest: {self.findings.failed[-1]})" if self.findings.failed else ""
        return f"{len(self.kills)} kills; requests: {fates_text}; {self.findings.count} findings{last}"

    async def check_new_requests(self) -> None:
        """Check the requests since the last check, and that the ledger has them."""
        issued = self.load.issued[self.judged :]
        self.judged += len(issued)
        self.judgements += 1
        self.findings.add(wrong_answers(issued, self.outages, self.platform.gateways))
        async with self.platform.state() as state:
            for one in issued:
                if one.fate is RequestFate.ACKNOWLEDGED and not await _is_recorded(state, one.request_id):
                    self.findings.add([f"{one} is not in the ledger yet"])


async def run_kills(
    platform: LocalPlatform, findings: Findings, plan: KillPlan, *, progress: bool = False
) -> ChaosRun:
    """Deploy, start the load, and kill until the plan is complete and every client has finished."""
    keys = make_keys(platform)
    deploy(platform)
    load = ChaosLoad(platform.urls, keys, seed=plan.seed, tokens=plan.tokens, limit_s=plan.limit_s)
    await load.record_expected()
    chaos = ChaosRun(platform, load, plan, random.Random(plan.seed), findings)
    until_s = time.monotonic() + plan.seconds
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(plan.clients))
        for kind in plan.first:
            await chaos.kill_next(kind)
        while (len(chaos.kills) < plan.kills or time.monotonic() < until_s) and not findings.too_many:
            await chaos.kill_next()
            if len(chaos.kills) // _JUDGE_EVERY > chaos.judgements:
                await chaos.check_new_requests()
                if progress:
                    print(chaos.progress(), file=sys.stderr, flush=True)
        for kind in plan.last:
            await chaos.kill_next(kind)
        load.stop()
    return chaos


async def _is_recorded(state: RedisState, request_id: str) -> bool:
    deadline_s = time.monotonic() + _QUIET_S
    while True:
        try:
            return bool(await state.requests_by_client_id(request_id))
        except StateUnavailable:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.2)


# Set-up and final checks.


def make_keys(platform: LocalPlatform) -> dict[str, str]:
    """Create a key per tenant; the last one has limits, which are counted but never reached."""
    limits = ("--requests-per-minute", "1000000", "--max-concurrent", "10000")
    return {
        tenant: platform.json(
            *("keys", "create", "--tenant", tenant, "--name", "chaos"),
            *(limits if tenant == _TENANTS[-1] else ()),
        )["key"]
        for tenant in _TENANTS
    }


def deploy(platform: LocalPlatform) -> None:
    coder = str(ROOT / "functions" / "tiny-coder")
    scaling = ("--target-concurrency", "4", "--keep-alive", "3s")
    platform.command("deploy", coder, "--name", MODEL, "--max-instances", "3", *scaling)
    platform.command("deploy", "builtin:echo", "--name", ECHO, *scaling)
    own = str(ROOT / "benchmarks" / "chaos" / "handler")
    platform.command("deploy", own, "--name", HANDLER, *scaling)


async def scale_to_zero(platform: LocalPlatform) -> None:
    """Stop every instance, so that all time is metered and reported. Raises RuntimeError, TimeoutError."""
    async with asyncio.timeout(_QUIET_S):
        while True:
            nodes = await asyncio.to_thread(platform.json, "nodes")
            whole = len(nodes) == len(platform.nodes) and all(node["state"] == "ready" for node in nodes)
            if whole and not any(node["instances"] for node in nodes):
                return
            for function in (MODEL, ECHO, HANDLER) if whole else ():
                await asyncio.to_thread(platform.command, "scale", function, "--instances", "0")
            await asyncio.sleep(0.2)


async def check_ledger(chaos: ChaosRun) -> dict[str, Any]:
    """Check the ledger after the load has ended; return its summary."""
    platform, findings = chaos.platform, chaos.findings
    await chaos.check_new_requests()
    try:
        await scale_to_zero(platform)
    except (RuntimeError, TimeoutError) as error:
        findings.add([f"the platform did not scale to zero: {error!r}"])
    books = await wait_for_ledger(platform, _QUIET_S / 3)
    balance = books.reconcile()
    findings.add(str(balance).splitlines())
    findings.add(ledger_mismatches(chaos.load.issued, books.records))
    for url in platform.urls:
        report = await asyncio.to_thread(platform.command, "usage", "report", "-o", "json", url=url)
        findings.add(wrong_sums(json.loads(report), books.records))
    expected = {one.name for one in platform.components if one.kind is not ComponentKind.HANDLER}
    if missing := expected - set(platform.processes()):
        findings.add([f"missing at the end: {', '.join(sorted(missing))}"])
    findings.add([f"orphaned process: {stray}" for stray in platform.strays()])
    return {
        **books.summary(balance),
        "intervals": len(books.intervals),
        "instances": len(balance.instances),
        "nodes": len(balance.nodes),
    }


@contextmanager
def chaos_platform(
    folder: Path | None, findings: Findings, *, nodes: int, gateways: int
) -> Iterator[LocalPlatform]:
    """Run a platform; processes left after `down` are findings. The folder is kept if given."""
    data = folder or Path(tempfile.mkdtemp(prefix="hypercast-chaos-"))
    memory = ("--gpu-memory", "512MiB", "--host-memory", "512MiB")
    flags = ("--allow-handlers", "--allow-unconfined-handlers", "--meter-interval", "5s", *memory)
    with running_platform(data, *flags, nodes=nodes, gateways=gateways) as platform:
        yield platform
    findings.add([f"left behind by `down`: {stray}" for stray in platform.strays()])
    if folder is None and not findings.count:
        shutil.rmtree(data)
