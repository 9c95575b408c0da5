"""A cast carried out by the nodes' own sessions on imagined links (pure, discrete events).

What `simulate` leaves out is here: nodes tell each other what they hold, and turn from a source that is too
slow to another. A port serves what is asked of it in the order of asking. Every change is told to all, so
this is for tens of nodes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from rdmacast.have_map import HaveMap
from rdmacast.links import Links, Simulation, port_seconds, stretches
from rdmacast.plan import TransferPlan
from rdmacast.session import Action, Ask, Drop, Pull, Session, SessionSettings, SessionState
from rdmacast.stragglers import Observed, around, slow_nodes


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
    """`settings` has the pulls in flight. If `directed`, somebody who hears what all pulls take plans anew
    around slow nodes. Raises ValueError if a node does not complete."""
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
        self._directed = directed
        self._slow: frozenset[int] = frozenset()
        self._epoch = 0
        # By (target, pull): its source, since when, and how many pulls of the target share its port.
        self._under_way: dict[tuple[int, int], tuple[int, float, int]] = {}
        self._ended: deque[Observed] = deque(maxlen=8 * nodes)
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

        sharing = 1 + sum(target == node for target, _ in self._under_way)
        self._under_way[node, pull.number] = (pull.source, self._now_s, sharing)
        self._later(self._now_s + self._links.latency_s, come)

    def _serve(self, source: int) -> None:
        port = self._ports[source]
        if port.is_sending or not port.waiting:
            return
        target, pull = port.waiting.popleft()
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
            self._do(target, self._sessions[target].arrived(pull.number, self._now_s))
            _, began_s, sharing = self._under_way.pop((target, pull.number))
            self._ended.append(Observed(pull.source, target, (self._now_s - began_s) / sharing))
            if self._directed:
                self._direct()

        self._later(self._now_s + out_s, free)
        self._later(came_s, arrive)

    def _direct(self) -> None:
        """Plan anew if a node turns out to be slow; the others hear of it a latency later."""
        ages = [
            Observed(source, target, (self._now_s - began_s) / sharing)
            for (target, _), (source, began_s, sharing) in self._under_way.items()
        ]
        limit_s = max((pull.seconds for pull in self._ended), default=0.0)
        late = [pull for pull in ages if pull.seconds > limit_s / 2]
        told = [pull for pull in (*self._ended, *late) if not {pull.source, pull.target} & self._slow]
        slow = self._slow | slow_nodes(told)
        orders = around(self._plan, slow) if slow != self._slow else None
        if orders is None:
            return
        self._slow, self._epoch = slow, self._epoch + 1
        self._ended.clear()  # what was seen under the plan of before tells nothing of the next
        epoch = self._epoch

        def replan() -> None:
            for node, session in enumerate(self._sessions):
                self._do(node, session.replan(epoch, orders[node], self._now_s))

        self._later(self._now_s + self._links.latency_s, replan)

    def _drop(self, node: int, number: int) -> None:
        """What is on its way still comes; what waits at its source's port does not."""

        def end() -> None:
            for port in self._ports:
                for waiting in port.waiting:
                    if waiting[0] == node and waiting[1].number == number:
                        port.waiting.remove(waiting)
                        del self._under_way[node, number]
                        self._do(node, self._sessions[node].failed(number, self._now_s))
                        return

        self._later(self._now_s + 2 * self._links.latency_s, end)
