"""Histories of a platform, as its nodes' meters and its gateways write them to the ledger: with requests
that go on elsewhere, nodes that are killed, calls that are lost, and clocks that are set."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from invoker.meter import GpuMeter
from invoker.meter_accounts import Account, MeteredCall, Record
from invoker.meter_events import Frame
from invoker.meter_replay import encode_frame, replay
from registry.instance import InstanceState
from registry.usage import GpuSlice, InstanceInterval, LostCall, RequestRecord
from tests.registry_records import request

ORIGIN_S = 1_700_000_000.0
NODES = ("n0", "n1")
STEPS_S = (0.0, -30.0, 45.0, 86_400.0)

Operations = st.lists(
    st.tuples(st.integers(0, 13), st.integers(0, 7), st.integers(0, 40_000_003)), min_size=10, max_size=60
)


class Tape:
    """A journal in memory."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, frame: Frame) -> bool:
        self.data += encode_frame(frame)
        return False

    def rotate(self, snapshot: Frame) -> None:
        self.data = encode_frame(snapshot)


@dataclass
class Ledger:
    """What has been written, and which instances are there."""

    records: list[RequestRecord] = field(default_factory=list)
    intervals: list[InstanceInterval] = field(default_factory=list)
    lost: list[LostCall] = field(default_factory=list)
    live: dict[str, str] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        if isinstance(record, LostCall):
            self.lost.append(record)
        else:
            self.intervals.append(record)


class Node:
    """One process after another under the same id."""

    def __init__(self, history: "History", name: str) -> None:
        self.name = name
        self.epoch = 0
        self.step_s = 0.0
        self.owed: list[Record] = []  # of processes that were killed, not delivered yet
        self._history = history
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.tape = Tape()
        self.accounts: list[Account] = []
        wall_s = ORIGIN_S + self._history.now_us / 1e6 + self.step_s
        self.meter = GpuMeter(self.name, self.epoch, lambda: self._history.now_us, wall_s, self.tape)

    def pay(self, count: int = 1_000_000) -> None:
        ledger = self._history.ledger
        while count and (due := self.meter.first_due()) is not None:
            ledger.add(due[1])
            self.meter.paid(due[0])
            count -= 1

    def kill(self) -> None:
        self.owed += replay(self.tape.data).remains()
        for account in self.accounts:
            del self._history.ledger.live[account.instance_id]
        self.start()

    def deliver(self) -> None:
        for record in self.owed:
            self._history.ledger.add(record)
        self.owed = []


@dataclass
class Attempt:
    node: Node
    epoch: int
    call: MeteredCall
    told_us: int = 0
    resting: bool = True

    @property
    def alive(self) -> bool:
        return self.node.epoch == self.epoch

    def rest(self) -> None:
        if self.alive and not self.resting:
            self.node.meter.rested(self.call)
        self.resting = True
        self.told_us = self.call.used_us if self.alive else self.told_us


@dataclass
class Asked:
    """A request under way, and its gateway's clock."""

    name: str
    tenant: str
    started_at: float
    attempts: list[Attempt]


class History:
    def __init__(self, operations: list[tuple[int, int, int]]) -> None:
        self.now_us = 1
        self.gateway_step_s = 0.0
        self.ledger = Ledger()
        self.nodes = [Node(self, name) for name in NODES]
        self.asked: list[Asked] = []
        self.unsettled: list[Attempt] = []
        self.names = 0
        for operation in operations:
            self.do(*operation)

    def do(self, kind: int, which: int, us: int) -> None:
        self.now_us += us
        node = self.nodes[which % 2]
        match kind:
            case 0 | 1:
                if len(node.accounts) < 3:
                    self.enter(node, "big" if which > 3 else "tiny")
            case 2 if node.accounts:
                account = node.accounts[which % len(node.accounts)]
                if account.state == InstanceState.STARTING:
                    node.meter.moved(account, InstanceState.READY)
            case 3 | 4 | 5 if node.accounts:
                self.names += 1
                attempt = self.begin(node, which, f"r{self.names}/0-{self.names:08x}")
                tenant = ("acme", "other")[which % 2]
                self.asked.append(Asked(f"r{self.names}", tenant, self.gateway_s(), [attempt]))
            case 6 if self.asked:
                self.finish(self.asked.pop(which % len(self.asked)))
            case 7 if self.asked:
                self.move(self.asked[which % len(self.asked)], which)
            case 8 if self.asked:  # its gateway dies
                for attempt in self.asked.pop(which % len(self.asked)).attempts:
                    attempt.rest()
                    if attempt.alive:
                        attempt.node.meter.lose([attempt.call])
            case 9:
                node.meter.cut()
            case 10:
                node.pay(which)
            case 11:
                self.settle(which)
            case 12 if which < 4:
                for asked in self.asked:  # the gateway knows what it was told so far
                    for attempt in asked.attempts:
                        if attempt.node is node and attempt.alive:
                            node.meter.tick()
                            attempt.told_us = attempt.call.used_us // (1 + which // 2)
                node.kill()
            case 12:
                node.deliver()
            case 13:
                self.gateway_step_s = STEPS_S[which % 4]
                node.step_s = STEPS_S[which // 2]

    def enter(self, node: Node, function: str) -> None:
        self.names += 1
        account = node.meter.enter(f"i{self.names}", function, 1, InstanceState.STARTING)
        node.accounts.append(account)
        self.ledger.live[account.instance_id] = node.name

    def begin(self, node: Node, which: int, call_id: str) -> Attempt:
        account = node.accounts[which % len(node.accounts)]
        call = node.meter.call_began(account, call_id)
        node.meter.working(call)
        return Attempt(node, node.epoch, call, resting=False)

    def move(self, asked: Asked, which: int) -> None:
        """The request goes on elsewhere."""
        node = self.nodes[which % 2]
        if not node.accounts:
            return
        asked.attempts[-1].rest()
        first = asked.attempts[0].call.call_id.partition("+")[0]
        asked.attempts.append(self.begin(node, which, f"{first}+{len(asked.attempts)}"))

    def finish(self, asked: Asked) -> None:
        for attempt in asked.attempts:
            attempt.rest()
        slices = tuple(
            GpuSlice(
                call_id=one.call.call_id,
                instance_id=one.call.account.instance_id,
                node=one.node.name,
                gpu_us=one.told_us,
            )
            for one in asked.attempts
            if one.told_us
        )
        used_us = sum(one.gpu_us for one in slices)
        record = request(
            asked.name,
            function=asked.attempts[0].call.account.function,
            tenant=asked.tenant,
            gpu=slices,
            billed_gpu_ms=-(-used_us // 1000),
            started_at=asked.started_at,
            ended_at=max(asked.started_at, self.gateway_s()),
        )
        self.ledger.records.append(record)
        self.unsettled += [one for one in asked.attempts if one.alive]

    def settle(self, count: int) -> None:
        batch, self.unsettled = self.unsettled[:count], self.unsettled[count:]
        for attempt in batch:
            if attempt.alive:
                attempt.node.meter.forget([attempt.call])

    def gateway_s(self) -> float:
        return ORIGIN_S + self.now_us / 1e6 + self.gateway_step_s

    def end(self, *, settled: bool = True) -> Ledger:
        """All ends in order; the whole ledger. Not `settled`: nodes hear of their last calls' records only
        when the instances are gone."""
        for asked in self.asked:
            self.finish(asked)
        self.asked = []
        if settled:
            self.settle(1_000_000)
        for node in self.nodes:
            for account in node.accounts:
                node.meter.moved(account, InstanceState.STOPPED, final=True)
        self.settle(1_000_000)
        for node in self.nodes:
            node.pay()
            node.deliver()
        self.ledger.live.clear()
        return self.ledger
