"""A cast of sessions over a network that delivers in any order, loses, damages and kills, by a seed."""

from dataclasses import dataclass, field, replace
from random import Random

from rdmacast.have_map import HaveMap
from rdmacast.plan import TransferPlan
from rdmacast.session import Session, SessionState
from rdmacast.session_actions import Action, Ask, Drop, Publish, Pull
from rdmacast.session_settings import SessionSettings


@dataclass(frozen=True)
class _Message:
    """`kind` is map, ask, began, came, damaged, failed or lost. To one life of a node, not to the next."""

    kind: str
    to: int
    life: int
    sender: int = -1
    number: int = -1
    told: HaveMap | None = None


@dataclass
class Network:
    """Delivers one waiting message at a time, drawn by `random`; time passes only when all is quiet.

    `loss` is the chance of a map, question or answer to vanish, but never twice in a row on one way, so
    that a living peer always answers in time; `damage` and `failure` are those of a pull, of which at
    most one hits a source and block.
    """

    plan: TransferPlan
    random: Random
    loss: float = 0.0
    damage: float = 0.0
    failure: float = 0.0
    settings: SessionSettings = field(default_factory=SessionSettings)
    kept: dict[int, set[int]] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)  # nothing comes to or from them, and nobody says so

    def __post_init__(self) -> None:
        self.now_s = 0.0
        self.messages: list[_Message] = []
        self.sessions: dict[int, Session] = {}
        self.lives = dict.fromkeys(range(self.plan.shape.nodes), 0)
        self.pulls: dict[tuple[int, int], Pull] = {}  # under way, by node and number
        self.dropped: set[tuple[int, int]] = set()
        self.waiting: dict[tuple[int, int], list[_Message]] = {}  # by source and block: how a pull will end
        self.read = 0  # blocks that came
        self._hit: set[tuple[int, int, int]] = set()
        self._vanished: set[tuple[str, int, int]] = set()
        for node in self.lives:
            self.begin(node)

    @property
    def alive(self) -> list[int]:
        return list(self.sessions)

    def begin(self, node: int, epoch: int = 0) -> None:
        """A node joins, or comes back with what it kept."""
        shape = self.plan.shape
        part = self.plan.receives(node)
        held = range(shape.blocks) if node in shape.sources else self.kept.get(node, ())
        self.sessions[node] = Session(
            blocks=shape.blocks,
            peers=[peer for peer in range(shape.nodes) if peer != node],
            order=list(zip(part.source.tolist(), part.block.tolist(), strict=True)),
            held=held,
            epoch=epoch,
            settings=self.settings,
        )
        self.lives[node] += 1
        self._do(node, [Publish(), *self.sessions[node].start(self.now_s)])

    def kill(self, node: int) -> None:
        """It hears and says no more; the others are told in any order."""
        session = self.sessions.pop(node)
        self.kept[node] = set(range(self.plan.shape.blocks)) - set(session.missing)
        self.pulls = {key: pull for key, pull in self.pulls.items() if key[0] != node}
        self.messages = [m for m in self.messages if not (m.sender == node and m.kind in ("map", "ask"))]
        self._serve(node)
        for peer in self.sessions:
            self._send(_Message("lost", peer, self.lives[peer], sender=node, number=self.lives[node] - 1))

    def step(self) -> bool:
        """Deliver a message, or let time pass. False once nothing will happen any more."""
        if self.messages:
            index = self.random.randrange(len(self.messages))
            self.messages[index], self.messages[-1] = self.messages[-1], self.messages[index]
            self._deliver(self.messages.pop())
            return True
        deadlines = [s.deadline_s for s in self.sessions.values() if s.deadline_s is not None]
        if not deadlines:
            return False
        self.now_s = max(self.now_s, min(deadlines))
        for node, session in list(self.sessions.items()):
            if session.deadline_s is not None and session.deadline_s <= self.now_s:
                self._do(node, session.passed(self.now_s))
        return True

    def _deliver(self, message: _Message) -> None:
        node = message.to
        if node not in self.sessions or message.life != self.lives[node]:
            return
        session = self.sessions[node]
        if message.kind in ("came", "damaged", "failed"):
            self._end(node, session, message)
        elif message.kind == "began":
            self._do(node, session.began(message.number, self.now_s))
        elif message.kind == "lost":
            self._do(node, session.lost(message.sender, self.now_s, message.number))
        elif message.kind == "ask":
            self._tell(node, message.sender, message.number)
        elif message.told is not None:
            answers = message.number if message.number >= 0 else None
            self._do(node, session.heard(message.sender, message.told, self.now_s, answers))

    def _end(self, node: int, session: Session, message: _Message) -> None:
        """A read ends once, whatever was dropped meanwhile."""
        pull = self.pulls.pop((node, message.number), None)
        if pull is None:
            return
        kind = message.kind
        source = self.sessions.get(pull.source)
        if kind == "came" and (source is None or pull.block in source.missing):
            kind = "failed"  # died under way
        self.read += kind == "came"
        ends = {"came": session.arrived, "damaged": session.damaged, "failed": session.failed}
        self._do(node, ends[kind](pull.number, self.now_s))

    def _do(self, node: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Pull):
                self._pull(node, action)
            elif isinstance(action, Drop):
                # The read ends when it ends: with the block if that was under way, else without.
                self._send(_Message("failed", node, self.lives[node], number=action.number))
            elif isinstance(action, Ask):
                message = _Message("ask", action.peer, self.lives[action.peer], node, action.number)
                self._send_lossy(message)
            else:
                for peer in self.sessions:
                    if peer != node:
                        self._tell(node, peer, -1)
        self._serve(node)

    def _pull(self, node: int, pull: Pull) -> None:
        assert pull.block not in {p.block for key, p in self.pulls.items() if key[0] == node}
        self.pulls[node, pull.number] = pull
        if {node, pull.source} & self.stuck:
            return
        way, kind, drawn = (node, pull.source, pull.block), "came", self.random.random()
        if way not in self._hit and drawn < self.damage + self.failure:
            self._hit.add(way)
            kind = "damaged" if drawn < self.damage else "failed"
        self.waiting.setdefault((pull.source, pull.block), []).append(
            _Message(kind, node, self.lives[node], number=pull.number)
        )
        self._serve(pull.source)

    def _serve(self, node: int) -> None:
        """Pulls wait at their source until it has the block; of one that is dead they fail."""
        ways = [way for way in self.waiting if way[0] == node]
        session = self.sessions.get(node)
        missing = session.missing if session is not None and ways else ()
        for way in [way for way in ways if way[1] not in missing]:
            for message in self.waiting.pop(way):
                if (message.to, message.number) in self.pulls and message.kind == "came":
                    self._send(replace(message, kind="began"))
                self._send(message)

    def _tell(self, node: int, peer: int, number: int) -> None:
        told = HaveMap.decode(self.sessions[node].have_map.encode())
        if peer in self.sessions:
            self._send_lossy(_Message("map", peer, self.lives[peer], node, number, told))

    def _send_lossy(self, message: _Message) -> None:
        way = (message.kind, message.sender, message.to)
        if {message.sender, message.to} & self.stuck:
            return
        if way not in self._vanished and self.random.random() < self.loss:
            self._vanished.add(way)
            return
        self._vanished.discard(way)
        self._send(message)

    def _send(self, message: _Message) -> None:
        self.messages.append(message)

    def run(self, most_steps: int = 200_000) -> None:
        for _ in range(most_steps):
            if not self.step():
                return
        raise AssertionError(f"the cast does not end: {self.sessions}")

    def states(self) -> set[SessionState]:
        return {session.state for session in self.sessions.values()}
