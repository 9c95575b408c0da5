"""The meter: whatever happens, all time is given once; and its journal: so at every byte of it."""

import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from invoker.meter import GpuMeter
from invoker.meter_accounts import Account, MeteredCall, Record, split_time
from invoker.meter_events import Frame
from invoker.meter_intervals import MAX_PARTS
from invoker.meter_journal import MIN_ROTATION, MeterJournal, adopt, discard
from invoker.meter_replay import encode_frame, replay
from registry.instance import InstanceState
from registry.usage import InstanceInterval, LostCall

STATES = (InstanceState.LOADING, InstanceState.READY, InstanceState.DRAINING)
ORIGIN_S = 1_700_000_000.0

Operations = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 7), st.integers(0, 100_003)), max_size=60)


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


@given(Operations)
@settings(max_examples=150, deadline=None)
def test_all_time_is_given_once_whatever_happens(operations: list[tuple[int, int, int]]) -> None:
    world = World(rotate_every=7)
    for operation in operations:
        world.do(*operation)
    world.finish()
    world.books.check(world.allocated_us)


@given(Operations)
@settings(max_examples=25, deadline=None)
def test_every_prefix_of_a_journal_adds_up(operations: list[tuple[int, int, int]]) -> None:
    world = World(rotate_every=1_000_000)
    for operation in operations[:30]:
        world.do(*operation)
    data, marks = world.tape.data, world.tape.marks
    ends = [end for end, _, _ in marks]
    for cut in range(ends[0], len(data) + 1):
        whole = sum(end <= cut for end in ends)
        state = replay(data[:cut])
        remains = state.remains()
        for account in state.accounts.values():
            known = sum(call.used_us for call in state.calls.values() if call.account is account)
            assert account.busy == account.settled_us + known
        # The process died after this frame: before the ledger heard anything more, or after.
        _, before, allocated_us = marks[whole - 1]
        after = marks[whole][1] if whole < len(marks) else world.books
        for books in (before.copy(), after.copy()):
            for record in [*remains, *remains]:
                books.add(record)
            if books.slices == before.slices:
                books.check(allocated_us)
        assert replay(data[:cut]).remains() == remains


def test_a_step_is_shared_by_tokens_and_with_other_instances_equally() -> None:
    now = [0]
    meter = GpuMeter("n0", 1, lambda: now[0], ORIGIN_S)
    left, right = (meter.enter(name, "f", 1, InstanceState.READY) for name in "lr")
    a, b, c = (meter.call_began(one, name) for one, name in ((left, "a"), (left, "b"), (right, "c")))
    meter.step_began(left)
    now[0] = 100
    meter.step_began(right)
    now[0] = 300
    meter.step_ended(left, [(a, 3), (b, 1)])
    now[0] = 350
    meter.step_ended(right, [(c, 1)])
    assert (a.used_us, b.used_us, c.used_us) == (150, 50, 150)
    assert meter.totals() == (350, 0, 0)
    now[0] = 400
    loading = meter.enter("s", "f", 1, InstanceState.STARTING)
    now[0] = 500
    meter.working(c)
    now[0] = 510
    meter.rested(c)
    assert meter.totals() == (360, 100, 50) and c.used_us == 160
    assert (left.idle, right.idle, loading.loading, loading.idle) == (25, 25, 100, 0)


def test_an_interval_ends_before_the_step_under_way() -> None:
    now = [0]
    meter = GpuMeter("n0", 1, lambda: now[0], ORIGIN_S)
    account = meter.enter("i", "f", 1, InstanceState.READY)
    call = meter.call_began(account, "a")
    now[0] = 1_000_000
    meter.step_began(account)
    now[0] = 3_000_000
    assert meter.longest_step_us() == 2_000_000
    meter.cut()
    meter.cut()
    meter.moved(account, InstanceState.DRAINING)
    meter.step_ended(account, [(call, 1)])
    meter.moved(account, InstanceState.STOPPED, final=True)
    records = []
    while (due := meter.first_due()) is not None:
        records.append(due[1])
        meter.paid(due[0])
    assert [(one.state, one.from_at - ORIGIN_S, one.to_at - ORIGIN_S, one.busy_us) for one in records] == [
        ("ready", 0.0, 1.0, 0),
        ("ready", 1.0, 1.0, 0),
        ("draining", 1.0, 3.0, 2_000_000),
    ]


def test_an_interval_that_names_many_calls_ends_early() -> None:
    now = [0]
    meter = GpuMeter("n0", 1, lambda: now[0], ORIGIN_S)
    account = meter.enter("i", "f", 1, InstanceState.READY)
    told = []
    meter.on_due(lambda: told.append(meter.first_due()))
    for number in range(2 * MAX_PARTS + 1):
        call = meter.call_began(account, f"r{number}/0")
        meter.step_began(account)
        now[0] += 10
        meter.step_ended(account, [(call, 1)])
        meter.forget([call])
    assert len(told) == 2
    meter.moved(account, InstanceState.STOPPED, final=True)
    records: list[InstanceInterval] = []
    while (due := meter.first_due()) is not None:
        assert isinstance(due[1], InstanceInterval)
        records.append(due[1])
        meter.paid(due[0])
    assert [(len(one.calls), one.busy_us, one.final) for one in records] == [
        (MAX_PARTS, 10 * MAX_PARTS, False),
        (MAX_PARTS, 10 * MAX_PARTS, False),
        (1, 10, True),
    ]


@given(st.integers(0, 10**9), st.lists(st.integers(1, 5000), min_size=1, max_size=50))
def test_shares_of_a_step_add_up(total_us: int, tokens: list[int]) -> None:
    shares = split_time(total_us, tokens)
    assert sum(shares) == total_us
    for share, count in zip(shares, tokens, strict=True):
        assert abs(share - total_us * count / sum(tokens)) <= 1
    assert sum(split_time(total_us, [0] * len(tokens))) == total_us


def test_engines_in_many_threads_lose_no_microsecond() -> None:
    ticks = iter(range(0, 10**9, 3))
    meter = GpuMeter("n0", 1, lambda: next(ticks), ORIGIN_S)
    accounts = [meter.enter(f"i{number}", "f", 1, InstanceState.READY) for number in range(4)]
    calls = [[meter.call_began(one, f"{one.instance_id}/{i}") for i in range(3)] for one in accounts]

    def engine(number: int) -> None:
        for _ in range(500):
            meter.step_began(accounts[number])
            meter.step_ended(accounts[number], [(call, 1) for call in calls[number]])

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for account, own in zip(accounts, calls, strict=True):
        assert account.busy == sum(call.used_us for call in own)
    meter.tick()
    assert sum(meter.totals()) + 3 >= sum(one.busy + one.idle for one in accounts) == sum(meter.totals()) - 3


def _meter(folder: Path, epoch: int, now_us: list[int]) -> tuple[GpuMeter, MeterJournal]:
    journal, adopted = MeterJournal(folder, "n0", epoch), adopt(folder)
    dues = [record for one in adopted for record in one.records]
    meter = GpuMeter("n0", epoch, lambda: now_us[0], ORIGIN_S, journal, dues)
    discard(adopted, journal)
    return meter, journal


def test_a_journal_is_adopted_once_and_only_when_its_process_is_gone(tmp_path: Path) -> None:
    now = [0]
    first, journal = _meter(tmp_path, 1, now)
    call = first.call_began(first.enter("i", "f", 1, InstanceState.READY), "r/0")
    first.working(call)
    now[0] = 700
    first.rested(call)
    now[0] = 900  # nothing is written of these
    assert adopt(tmp_path) == []
    journal.close(remove=False)  # as the kernel does at the end of a process
    _, heir = _meter(tmp_path, 2, now)
    assert [path.name for path in tmp_path.iterdir()] == ["n0.2.journal"]
    heir.close(remove=False)  # it dies as well, before the ledger answered
    (tmp_path / "n0.3.tmp").write_bytes(b"the beginning of a snapshot")
    third, last = _meter(tmp_path, 3, now)
    (_, interval), (_, lost) = third._dues.items()
    assert (interval.busy_us, interval.idle_us) == (700, 0) and lost.used_us == 700
    assert interval.to_at == ORIGIN_S + 700 / 1e6 and not third.at_rest
    for due in list(third._dues):
        third.paid(due)
    assert third.at_rest
    last.close(remove=True)
    assert not tmp_path.exists()


def test_a_journal_is_begun_anew_before_it_grows(tmp_path: Path) -> None:
    now = [0]
    meter, journal = _meter(tmp_path, 1, now)
    account = meter.enter("i", "f", 1, InstanceState.READY)
    calls = [meter.call_began(account, f"r{number}/0") for number in range(64)]
    largest = 0
    for _ in range(8000):
        meter.step_began(account)
        now[0] += 100
        meter.step_ended(account, [(call, 1) for call in calls])
        largest = max(largest, journal._size)
    assert largest + 1000 >= MIN_ROTATION and journal.path.stat().st_size < MIN_ROTATION
    state = replay(journal.path.read_bytes())
    assert [call.used_us for call in state.calls.values()] == [call.used_us for call in calls]
    journal.close(remove=True)


def test_a_full_disk_stops_the_journal_and_not_the_node(tmp_path: Path) -> None:
    now = [0]
    meter, journal = _meter(tmp_path / "j", 1, now)
    account = meter.enter("i", "f", 1, InstanceState.READY)
    before = journal.path.read_bytes()
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._fd)
    os.close(full)
    now[0] = 1000
    meter.cut()
    assert not journal.written and journal.path.read_bytes() == before
    journal._retry_s = 0.0  # a second later
    now[0] = 2000
    meter.moved(account, InstanceState.STOPPED, final=True)
    assert journal.written
    assert [one.idle_us for one in replay(journal.path.read_bytes()).remains()] == [1000, 1000]
    journal.close(remove=True)
