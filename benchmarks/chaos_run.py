"""One run of random kills over a platform under load, and what is checked meanwhile and afterwards."""

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

from benchmarks.chaos_check import (
    Findings,
    Outage,
    final_books,
    wrong_answers,
    wrong_books,
    wrong_sums,
)
from benchmarks.chaos_cluster import Cluster, Kind, Part
from benchmarks.chaos_load import ECHO, HANDLER, MODEL, Fate, Load
from benchmarks.machine import ROOT
from registry.errors import NotFound, StateUnavailable
from registry.redis_state import RedisState

_GIVE_UP_S = 60.0
_JUDGE_EVERY = 10  # kills
# Of so many kills in a row, how many are of each kind: what dies rarely is killed rarely, but in each run.
_DECK = Counter(
    {Kind.GATEWAY: 6, Kind.NODE: 7, Kind.REDIS: 6, Kind.HANDLER: 3, Kind.ZYGOTE: 2, Kind.SUPERVISOR: 1}
)
_PLAIN = (Kind.GATEWAY, Kind.NODE, Kind.REDIS)  # of which two die at once at times
_TWO_AT_ONCE = 0.1
_QUIET_S = 90.0
_TENANTS = ("acme", "bolt", "cube")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill: how long until its process was started again, and from there to a good answer."""

    part: Part
    at_s: float
    restart_s: float
    recovery_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """What a run does: so many kills, or kills for so many seconds.

    The kinds in `first` are killed first and those in `last` at the end, whoever is spared; between them
    `deck` is shuffled again and again, and `spared` are not killed. The pause before a kill is drawn evenly
    from `pause_s`. `limit_s` is how long a client waits, `recovery_s` how long the first good answer may
    take from the restart of a process.
    """

    seed: int
    kills: int = 0
    seconds: float = 0.0
    clients: int = 8
    tokens: int = 96
    pause_s: tuple[float, float] = (0.0, 0.6)
    spared: frozenset[Part] = frozenset()
    deck: Counter[Kind] = field(default_factory=_DECK.copy)
    first: tuple[Kind, ...] = ()
    last: tuple[Kind, ...] = ()
    limit_s: float = 15.0
    recovery_s: float = 5.0


@dataclass(slots=True)
class Chaos:
    """One run over a cluster that is up."""

    cluster: Cluster
    load: Load
    storm: Storm
    chance: random.Random
    findings: Findings
    kills: list[Kill] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    judged: int = 0
    judgements: int = 0
    cards: list[Kind] = field(default_factory=list)

    async def strike(self, kind: Kind | None = None) -> None:
        """Kill one part, or two, and wait until the service answers through every gateway."""
        await asyncio.sleep(self.chance.uniform(*self.storm.pause_s))
        if kind is None:
            victims = self._victims()
        else:
            victims = [self.chance.choice([part for part in self.cluster.parts if part.kind is kind])]
        async with asyncio.TaskGroup() as group:
            for part in victims:
                group.create_task(self._kill(part))

    def _victims(self) -> list[Part]:
        parts = [part for part in self.cluster.parts if part not in self.storm.spared]
        kind = self._draw(parts)
        first = self.chance.choice([part for part in parts if part.kind is kind])
        others = [part for part in parts if part.kind in _PLAIN and part != first]
        two = first.kind in _PLAIN and self.chance.random() < _TWO_AT_ONCE
        return [first, self.chance.choice(others)] if two and others else [first]

    def _draw(self, parts: Sequence[Part]) -> Kind:
        """The kind of the next kill: of each one at first, so that short runs have them all."""
        if not self.cards:
            each = [kind for kind in self.storm.deck if any(part.kind is kind for part in parts)]
            more = [kind for kind in (self.storm.deck - Counter(each)).elements() if kind in each]
            self.chance.shuffle(each)
            self.chance.shuffle(more)
            self.cards = [*more, *each]
        return self.cards.pop()

    async def _kill(self, part: Part) -> None:
        if part.kind is Kind.HANDLER:
            await self._good(0, "handler")  # so that there is one
        at_s = time.monotonic()
        before = self.cluster.kill(part)
        if before is None:
            return  # it had not started yet
        restart_s = await self.cluster.restarted(part, before, _GIVE_UP_S)
        if restart_s is None:
            self.findings.add([f"{part.name} was not started again within {_GIVE_UP_S:g} s"])
            return
        through = [self.cluster.gateways.index(part)] if part.kind is Kind.GATEWAY else None
        work = "handler" if part.kind is Kind.HANDLER else "whole"
        recovery_s = await self._answering(restart_s, through, work)
        if recovery_s is None:
            self.findings.add([f"no good answer within {_GIVE_UP_S:g} s of the restart of {part.name}"])
        elif recovery_s > self.storm.recovery_s:
            self.findings.add([f"{recovery_s:.2f} s from the restart of {part.name} to a good answer"])
        self.outages.append(Outage(part=part, from_s=at_s, to_s=time.monotonic()))
        self.kills.append(
            Kill(part=part, at_s=at_s, restart_s=restart_s - at_s, recovery_s=recovery_s or _GIVE_UP_S)
        )

    async def _answering(self, since_s: float, through: Sequence[int] | None, work: str) -> float | None:
        """Seconds until an answer was good through each of these gateways (all)."""
        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(self._good(index, work))
                for index in (range(len(self.cluster.gateways)) if through is None else through)
            ]
        ends = [task.result() for task in asking]
        return None if None in ends else max(0.0, max(end for end in ends if end is not None) - since_s)

    async def _good(self, gateway: int, work: str) -> float | None:
        deadline_s = time.monotonic() + _GIVE_UP_S
        while time.monotonic() < deadline_s:
            if await self.load.probe(gateway, work):
                return time.monotonic()
            await asyncio.sleep(0.05)
        return None

    def progress(self) -> str:
        """One line for people."""
        fates = Counter(one.fate for one in self.load.asked)
        told = ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
        last = f" (the last: {self.findings.failed[-1]})" if self.findings.failed else ""
        return f"{len(self.kills)} kills; requests: {told}; {self.findings.count} wrong{last}"

    async def judge(self) -> None:
        """Look at the answers that came since the last time, and whether the ledger has them."""
        asked = self.load.asked[self.judged :]
        self.judged += len(asked)
        self.judgements += 1
        self.findings.add(wrong_answers(asked, self.outages, self.cluster.gateways))
        async with self.cluster.state() as state:
            for one in asked:
                if one.fate is Fate.ACKNOWLEDGED and not await _is_there(state, one.request_id):
                    self.findings.add([f"{one} is not in the ledger by now"])


async def rage(cluster: Cluster, findings: Findings, storm: Storm, *, told: bool = False) -> Chaos:
    """Deploy, load, kill, until the storm is over and every client has its last answer."""
    keys = make_keys(cluster)
    deploy(cluster)
    load = Load(cluster.urls, keys, seed=storm.seed, tokens=storm.tokens, limit_s=storm.limit_s)
    await load.learn()
    chaos = Chaos(cluster, load, storm, random.Random(storm.seed), findings)
    until_s = time.monotonic() + storm.seconds
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(storm.clients))
        for kind in storm.first:
            await chaos.strike(kind)
        while (len(chaos.kills) < storm.kills or time.monotonic() < until_s) and not findings.hopeless:
            await chaos.strike()
            if len(chaos.kills) // _JUDGE_EVERY > chaos.judgements:
                await chaos.judge()
                if told:
                    print(chaos.progress(), file=sys.stderr, flush=True)
        for kind in storm.last:
            await chaos.strike(kind)
        load.stop()
    return chaos


async def _is_there(state: RedisState, request_id: str) -> bool:
    deadline_s = time.monotonic() + _QUIET_S
    while True:
        try:
            await state.request(request_id)
        except NotFound:
            return False
        except StateUnavailable:
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.2)
        else:
            return True


# Before and after.


def make_keys(cluster: Cluster) -> dict[str, str]:
    """A key of each tenant; the last one's has limits, which are counted though never reached."""
    limits = ("--requests-per-minute", "1000000", "--max-concurrent", "10000")
    return {
        tenant: cluster.json(
            *("keys", "create", "--tenant", tenant, "--name", "chaos"),
            *(limits if tenant == _TENANTS[-1] else ()),
        )["key"]
        for tenant in _TENANTS
    }


def deploy(cluster: Cluster) -> None:
    coder = str(ROOT / "functions" / "tiny-coder")
    scaling = ("--target-concurrency", "4", "--keep-alive", "3s")
    cluster.command("deploy", coder, "--name", MODEL, "--max-instances", "3", *scaling)
    cluster.command("deploy", "builtin:echo", "--name", ECHO, *scaling)
    own = str(ROOT / "benchmarks" / "chaos_handler")
    cluster.command("deploy", own, "--name", HANDLER, *scaling)


async def all_asleep(cluster: Cluster) -> None:
    """Stop every instance: all time is then metered, and told. Raises RuntimeError, TimeoutError."""
    async with asyncio.timeout(_QUIET_S):
        while True:
            nodes = await asyncio.to_thread(cluster.json, "nodes")
            whole = len(nodes) == len(cluster.nodes) and all(node["state"] == "ready" for node in nodes)
            if whole and not any(node["instances"] for node in nodes):
                return
            for function in (MODEL, ECHO, HANDLER) if whole else ():
                await asyncio.to_thread(cluster.command, "scale", function, "--instances", "0")
            await asyncio.sleep(0.2)


async def close_books(chaos: Chaos) -> dict[str, Any]:
    """Check all when the load has ended; returns what is told of the ledger."""
    cluster, findings = chaos.cluster, chaos.findings
    await chaos.judge()
    try:
        await all_asleep(cluster)
    except (RuntimeError, TimeoutError) as error:
        findings.add([f"the platform does not come to rest: {error!r}"])
    books = await final_books(cluster, _QUIET_S / 3)
    balance = books.conservation()
    findings.add(str(balance).splitlines())
    findings.add(wrong_books(chaos.load.asked, books.records))
    for url in cluster.urls:
        report = await asyncio.to_thread(cluster.command, "usage", "report", "-o", "json", url=url)
        findings.add(wrong_sums(json.loads(report), books.records))
    expected = {part.name for part in cluster.parts if part.kind is not Kind.HANDLER}
    if missing := expected - set(cluster.processes()):
        findings.add([f"not there at the end: {', '.join(sorted(missing))}"])
    findings.add([f"an orphan: {stray}" for stray in cluster.strays()])
    return {
        "rows": len(books.records),
        "lost_calls": len(books.lost),
        "intervals": len(books.intervals),
        "instances": len(balance.instances),
        "nodes": len(balance.nodes),
        "busy_us": sum(one.busy_us for one in balance.instances),
        "used_us": sum(one.used_us for one in balance.instances),
        "lost_us": sum(one.lost_us for one in balance.instances),
        "verdict": str(balance.verdict),
    }


@contextmanager
def platform(folder: Path | None, findings: Findings, **size: int) -> Iterator[Cluster]:
    """A cluster that is up; what it leaves behind after `down` is found wrong. Its folder stays if given."""
    data = folder or Path(tempfile.mkdtemp(prefix="hypercast-chaos-"))
    cluster = Cluster(data, **size)
    memory = ("--gpu-memory", "512MiB", "--host-memory", "512MiB")
    cluster.up("--allow-handlers", "--meter-interval", "5s", *memory)
    try:
        yield cluster
    finally:
        cluster.down()
        findings.add([f"left behind by `down`: {stray}" for stray in cluster.strays()])
        if folder is None and not findings.count:
            shutil.rmtree(data)
