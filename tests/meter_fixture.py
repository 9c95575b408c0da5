"""A meter driven by random numbers, and beside it what a ledger and a journal hold of it."""

from collections import Counter
from dataclasses import dataclass, field

from invoker.meter import GpuMeter
from invoker.meter_accounts import Account, MeteredCall, Record
from invoker.meter_events import Frame
from invoker.meter_replay import encode_frame
from registry.instance import InstanceState
from registry.usage import InstanceInterval, LostCall

STATES = (InstanceState.LOADING, InstanceState.READY, InstanceState.DRAINING)
ORIGIN_S = 1_700_000_000.0


@dataclass
class Books:
    """What a ledger holds: records once by their identity, and what requests were billed for calls."""

    intervals: dict[tuple[str, str, float], InstanceInterval] = field(default_factory=dict)
    lost: dict[str, LostCall] = field(default_factory=dict)
    slices: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        if isinstance(record, LostCall):
            self.lost.setdefault(record.id, record)
        else:
            self.intervals.setdefault((record.instance_id, record.state, record.from_at), record)

    def copy(self) -> "Books":
        return Books(dict(self.intervals), dict(self.lost), dict(self.slices))

    def check(self, allocated_us: int) -> None:
        """Nothing is missing and nothing counted twice."""
        billed: dict[str, int] = {}
        for instance, used in self.slices.values():
            billed[instance] = billed.get(instance, 0) + used
        for lost in self.lost.values():
            _, recorded = self.slices.get(lost.call_id, ("", 0))
            billed[lost.instance_id] = billed.get(lost.instance_id, 0) + max(0, lost.used_us - recorded)
        busy: dict[str, int] = {}
        for one in self.intervals.values():
            assert min(one.busy_us, one.loading_us, one.idle_us) >= 0 and one.to_at >= one.from_at
            busy[one.instance_id] = busy.get(one.instance_id, 0) + one.busy_us
        assert {k: v for k, v in busy.items() if v} == {k: v for k, v in billed.items() if v}
        assert sum(one.allocated_us for one in self.intervals.values()) == allocated_us
        self.check_parts()

    def check_parts(self) -> None:
        """Intervals follow each other up to the final one, and say whose all busy time is."""
        chains: dict[str, list[InstanceInterval]] = {}
        for one in sorted(self.intervals.values(), key=lambda one: (one.from_at, one.to_at)):
            chains.setdefault(one.instance_id, []).append(one)
            assert sum(part.used_us for part in one.calls) == one.busy_us
        lost = {call.call_id: call.used_us for call in self.lost.values()}
        for chain in chains.values():
            ends = Counter(one.from_at for one in chain)
            ends.subtract(one.to_at for one in chain)
            assert sorted(count for count in ends.values() if count) in ([], [-1, 1])
            assert sum(one.final for one in chain) == 1
            parts = [part for one in chain for part in one.calls]
            told: dict[str, int] = {}
            for part in sorted(parts, key=lambda part: (part.to_us, part.over)):
                assert part.from_us == told.get(part.call_id, 0) and part.used_us >= 0
                told[part.call_id] = part.to_us
                if part.over:
                    recorded = self.slices.get(part.call_id, ("", 0))[1]
                    assert part.to_us == max(recorded, lost.get(part.call_id, 0))
            overs = [part.call_id for part in parts if part.over]
            assert len(set(overs)) == len(overs)


class Tape:
    """A journal in memory; with each frame what the ledger held and what was allocated when it came."""

    def __init__(self, world: "World", rotate_every: int) -> None:
        self._world = world
        self._rotate_every = rotate_every
        self.data = b""
        self.marks: list[tuple[int, Books, int]] = []

    def write(self, frame: Frame) -> bool:
        self.data += encode_frame(frame)
        self.marks.append((len(self.data), self._world.books.copy(), self._world.allocated_us))
        return len(self.marks) % self._rotate_every == 0

    def rotate(self, snapshot: Frame) -> None:
        self.data = b""
        self.marks = []
        self.write(snapshot)


class World:
    """A meter driven by random numbers, and an account of presence that is kept apart from it."""

    def __init__(self, rotate_every: int) -> None:
        self.now_us = 5_000
        self.allocated_us = 0
        self.books = Books()
        self.tape = Tape(self, rotate_every)
        self.meter = GpuMeter("n0", 3, lambda: self.now_us, ORIGIN_S, self.tape)
        self.accounts: list[Account] = []
        self.calls: list[MeteredCall] = []  # not settled
        self.stepping: list[Account] = []
        self.working: list[MeteredCall] = []
        self.names = 0

    def name(self) -> str:
        self.names += 1
        return f"x{self.names}"

    def wait(self, us: int) -> None:
        self.now_us += us
        if self.accounts:
            self.allocated_us += us
        assert sum(self.meter.totals()) <= self.allocated_us

    def do(self, kind: int, which: int, us: int) -> None:
        self.wait(us)
        match kind:
            case 0:
                if len(self.accounts) < 4:
                    self.accounts.append(self.meter.enter(self.name(), "f", 1, InstanceState.STARTING))
            case 1 if self.accounts:
                account = self.accounts[which % len(self.accounts)]
                if account.state not in STATES[which % 3 :]:  # no life cycle goes back
                    self.meter.moved(account, STATES[which % 3])
            case 2 if self.accounts:
                account = self.accounts.pop(which % len(self.accounts))
                for call in [one for one in self.working if one.account is account]:
                    self.rest(call)
                if account in self.stepping and which % 2:  # else it is gone in the middle of a step
                    self.end_step(account, which)
                if account in self.stepping:
                    self.stepping.remove(account)
                self.meter.moved(account, InstanceState.STOPPED, final=True)
            case 3 | 4 if self.accounts:
                account = self.accounts[which % len(self.accounts)]
                if account in self.stepping:
                    self.end_step(account, which)
                elif not account.working:
                    self.stepping.append(account)
                    self.meter.step_began(account)
            case 5 if self.accounts:
                account = self.accounts[which % len(self.accounts)]
                self.calls.append(self.meter.call_began(account, self.name()))
            case 6 if self.calls:
                call = self.calls[which % len(self.calls)]
                if call in self.working:
                    self.rest(call)
                elif call.account in self.accounts and call.account not in self.stepping:
                    self.meter.working(call)
                    self.working.append(call)
            case 7 if self.calls:
                call = self.calls[which % len(self.calls)]
                if call not in self.working and call.account not in self.stepping:
                    if which % 3 == 0:
                        self.meter.lose([call])
                    else:  # its request's record says less than it used where the gateway did not wait
                        told = call.used_us // 2 if which == 7 else call.used_us
                        self.books.slices[call.call_id] = (call.account.instance_id, told)
                        if told < call.used_us:
                            self.meter.lose([call])
                        self.meter.forget([call])
                        self.calls.remove(call)
            case 8:
                self.meter.cut(older_than_us=which * 1000)
            case 9:
                self.pay(which)
            case 10:
                self.meter.tick()

    def rest(self, call: MeteredCall) -> None:
        self.working.remove(call)
        self.meter.rested(call)

    def end_step(self, account: Account, which: int) -> None:
        self.stepping.remove(account)
        own = [call for call in self.calls if call.account is account and not call.lost]
        self.meter.step_ended(account, [(call, 1 + (which + i) % 5) for i, call in enumerate(own)])

    def pay(self, count: int) -> None:
        while count and (due := self.meter.first_due()) is not None:
            number, record = due
            self.books.add(record)
            self.meter.paid(number)
            count -= 1

    def finish(self) -> None:
        """Everything ends in order."""
        for call in list(self.working):
            self.rest(call)
        for account in list(self.stepping):
            self.end_step(account, 0)
        for account in self.accounts:
            self.meter.moved(account, InstanceState.STOPPED, final=True)
        self.meter.lose(self.calls)
        self.pay(100_000)
        assert sum(self.meter.totals()) == self.allocated_us
        assert self.meter.at_rest and not self.meter.longest_step_us()
