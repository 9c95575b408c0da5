"""A cast carried out by the nodes' own sessions on imagined links (pure, discrete events).

What `simulate` leaves out is here: nodes tell each other what they hold, and turn from a source that is too
slow to another. A port serves what is asked of it in the order of asking. Every change is told to all, so
this is for tens of nodes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

import numpy as np

from rdmacast.have_map import HaveMap
from rdmacast.links import Links, Simulation, port_seconds, stretches
from rdmacast.observer import LEAST_MEMBERS, Observer, report_every_s
from rdmacast.plan import TransferPlan
from rdmacast.pull_log import PullLog
from rdmacast.pull_report import Verdict
from rdmacast.session import Session, SessionState
from rdmacast.session_actions import Action, Ask, Drop, Pull
from rdmacast.session_settings import SessionSettings
from rdmacast.stragglers import order_around


@dataclass(slots=True)
class _Port:
    """`waiting` are (target, pull) to be sent; `taken_s`: until when the port receives."""

    waiting: deque[tuple[int, Pull]] = field(default_factory=deque)
    is_sending: bool = False
    taken_s: float = 0.0


def simulate_sessions(
    plan: TransferPlan,
    links: Links,
    block_bytes: float = 1.0,
    settings: SessionSettings | None = None,
    *,
    directed: bool = False,
) -> Simulation:
    """`settings` has the pulls in flight. If `directed`, the nodes tell an observer what their pulls take,
    who has them plan anew around slow nodes. Raises ValueError if a node does not complete."""
    return _Cast(plan, links, block_bytes, settings or SessionSettings(), directed).run()


class _Cast:
    def __init__(
        self,
        plan: TransferPlan,
        links: Links,
        block_bytes: float,
        settings: SessionSettings,
        directed: bool,
    ) -> None:
        if links.pairs or plan.is_local().any():
            raise ValueError("sessions are simulated on one network, without pairs or scale-up domains")
        nodes, blocks = plan.shape.nodes, plan.shape.blocks
        self._plan = plan
        self._links = links
        self._directed = directed and nodes >= LEAST_MEMBERS
        self._verdict = Verdict(plan=0, slow=())
        self._observer = Observer()
        self._logs = [PullLog("simulated", node) for node in range(nodes)]
        self._sources = plan.shape.sources
        self._port_s: list[float] = port_seconds(links, nodes, block_bytes).tolist()
        self._stretch = stretches(links, nodes * blocks).reshape(nodes, blocks)
        self._ports = [_Port() for _ in range(nodes)]
        self._arrived_s = np.full((nodes, blocks), np.inf)
        self._arrived_s[list(self._sources)] = 0.0
        self._sessions = [self._session(plan, node, settings) for node in range(nodes)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0
        self._now_s = 0.0

    @staticmethod
    def _session(plan: TransferPlan, node: int, settings: SessionSettings) -> Session:
        part, shape = plan.receives(node), plan.shape
        return Session(
            blocks=shape.blocks,
            peers=[peer for peer in range(shape.nodes) if peer != node],
            order=list(zip(part.source.tolist(), part.block.tolist(), strict=True)),
            held=range(shape.blocks) if node in shape.sources else (),
            settings=settings,
        )

    def run(self) -> Simulation:
        for node, session in enumerate(self._sessions):
            self._tell(node)
            self._do(node, session.start(0.0))
            if self._directed and node not in self._sources:
                self._later(report_every_s(len(self._sessions)), partial(self._report, node))
        while self._events and any(session.state is SessionState.RUNNING for session in self._sessions):
            self._now_s, _, happen = heappop(self._events)
            happen()
        for session in self._sessions:
            if session.state is not SessionState.COMPLETE:
                raise ValueError(f"the cast does not end well: {session}")
        return Simulation(arrived_s=self._arrived_s, sources=self._sources)

    def _later(self, at_s: float, happen: Callable[[], None]) -> None:
        self._made += 1
        heappush(self._events, (at_s, self._made, happen))

    def _do(self, node: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Pull):
                self._send_pull(node, action)
            elif isinstance(action, Drop):
                self._drop(node, action.number)
            elif isinstance(action, Ask):
                self._ask(node, action)
        if any(not isinstance(action, Pull | Drop | Ask) for action in actions):
            self._tell(node)
        deadline_s = self._sessions[node].deadline_s
        if deadline_s is not None:
            self._later(deadline_s, lambda: self._pass(node))

    def _pass(self, node: int) -> None:
        session = self._sessions[node]
        if session.deadline_s is not None and session.deadline_s <= self._now_s:
            self._do(node, session.passed(self._now_s))

    def _tell(self, node: int) -> None:
        """All that the others learn of a node is a map, a latency later."""
        told = self._sessions[node].have_map

        def hear() -> None:
            for peer, session in enumerate(self._sessions):
                if peer != node:
                    self._do(peer, session.heard(node, told, self._now_s))

        self._later(self._now_s + self._links.latency_s, hear)

    def _ask(self, node: int, ask: Ask) -> None:
        def answer() -> None:
            told = self._sessions[ask.peer].have_map
            self._later(self._now_s + self._links.latency_s, lambda: hear(told))

        def hear(told: HaveMap) -> None:
            self._do(node, self._sessions[node].heard(ask.peer, told, self._now_s, ask.number))

        self._later(self._now_s + self._links.latency_s, answer)

    def _send_pull(self, node: int, pull: Pull) -> None:
        def come() -> None:
            self._ports[pull.source].waiting.append((node, pull))
            self._serve(pull.source)

        self._later(self._now_s + self._links.latency_s, come)

    def _serve(self, source: int) -> None:
        """The first that waits for a block which is there."""
        port, held = self._ports[source], self._arrived_s[source]
        if port.is_sending:
            return
        asked = next((asked for asked in port.waiting if held[asked[1].block] <= self._now_s), None)
        if asked is None:
            return
        port.waiting.remove(asked)
        target, pull = asked
        self._later(self._now_s + self._links.latency_s, partial(self._begin, target, pull))
        stretch = float(self._stretch[target, pull.block])
        out_s, in_s = self._port_s[source] * stretch, self._port_s[target] * stretch
        taker = self._ports[target]
        came_s = max(self._now_s + self._links.latency_s + max(out_s, in_s), taker.taken_s + in_s)
        taker.taken_s = came_s
        port.is_sending = True

        def free() -> None:
            port.is_sending = False
            self._serve(source)

        def arrive() -> None:
            self._arrived_s[target, pull.block] = self._now_s
            self._logs[target].ended(pull.number, self._now_s, came=True)
            self._do(target, self._sessions[target].arrived(pull.number, self._now_s))
            self._serve(target)

        self._later(self._now_s + out_s, free)
        self._later(came_s, arrive)

    def _begin(self, target: int, pull: Pull) -> None:
        self._logs[target].began(pull.number, pull.source, self._now_s)
        self._do(target, self._sessions[target].began(pull.number, self._now_s))

    def _report(self, node: int) -> None:
        """The observer hears it a latency later, and all hear of its verdict another latency later."""
        if self._sessions[node].state is not SessionState.RUNNING:
            return
        report = self._logs[node].report(self._verdict.plan, self._verdict.slow, self._now_s)

        def hear() -> None:
            verdict = self._observer.heard(report, self._now_s)
            if verdict is not None:
                self._later(self._now_s + self._links.latency_s, partial(self._replan, verdict))

        self._later(self._now_s + self._links.latency_s, hear)
        self._later(self._now_s + report_every_s(len(self._sessions)), partial(self._report, node))

    def _replan(self, verdict: Verdict) -> None:
        self._verdict = verdict
        for node in self._plan.shape.targets:
            order = order_around(self._plan.planner, self._plan.shape, verdict.slow, node)
            if order is not None:
                self._do(node, self._sessions[node].replan(verdict.plan, order, self._now_s))

    def _drop(self, node: int, number: int) -> None:
        """What is on its way still comes; what waits at its source's port does not."""

        def end() -> None:
            for port in self._ports:
                for waiting in port.waiting:
                    if waiting[0] == node and waiting[1].number == number:
                        port.waiting.remove(waiting)
                        self._logs[node].ended(number, self._now_s, came=False)
                        self._do(node, self._sessions[node].failed(number, self._now_s))
                        return

        self._later(self._now_s + 2 * self._links.latency_s, end)
