"""The meter: whatever happens, all time is given once; and its journal: so at every byte of it."""

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from invoker.metering.accounts import split_time
from invoker.metering.intervals import MAX_PARTS
from invoker.metering.meter import GpuMeter
from invoker.metering.replay import replay
from registry.accounting.presence import Presence
from registry.accounting.reconciliation import micros
from registry.records.instance import InstanceState
from tests.fixtures.meter import ORIGIN_S, World, paid

Operations = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 7), st.integers(0, 100_003)), max_size=60)


GpuCounts = st.sampled_from([1, 2, 3, 8])


@given(Operations, GpuCounts)
@settings(max_examples=150)
def test_all_time_is_given_once_whatever_happens(
    operations: list[tuple[int, int, int]], gpu_count: int
) -> None:
    world = World(rotate_every=7, gpu_count=gpu_count)
    for operation in operations:
        world.do(*operation)
    world.finish()
    world.books.check(world.allocated_us)
    assert {one.gpu_count for one in world.books.intervals.values()} <= {gpu_count}
    records = (world.books.intervals.values(), world.books.lost.values())
    presence = Presence(gpu_count=gpu_count)
    for one in sorted(records[0], key=lambda one: one.to_at):
        presence.add(micros(one.from_at), micros(one.to_at), one.allocated_us)
    assert abs(presence.over_us) <= gpu_count * 4 * max(1, presence.intervals)


@given(Operations, GpuCounts)
@settings(max_examples=25)
def test_every_prefix_of_a_journal_adds_up(operations: list[tuple[int, int, int]], gpu_count: int) -> None:
    world = World(rotate_every=1_000_000, gpu_count=gpu_count)
    for operation in operations[:30]:
        world.do(*operation)
    data, marks = world.tape.data, world.tape.marks
    ends = [end for end, _, _ in marks]
    for cut in range(ends[0], len(data) + 1):
        whole = sum(end <= cut for end in ends)
        state = replay(data[:cut])
        remains = state.unsent_records()
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
        assert replay(data[:cut]).unsent_records() == remains


def test_a_step_is_shared_by_tokens_and_with_other_instances_equally() -> None:
    now = [0]
    meter = GpuMeter("n0", 1, lambda: now[0], ORIGIN_S)
    left, right = (meter.open_account(name, "f", 1, InstanceState.READY) for name in "lr")
    a, b, c = (meter.open_call(one, name) for one, name in ((left, "a"), (left, "b"), (right, "c")))
    meter.start_step(left)
    now[0] = 100
    meter.start_step(right)
    now[0] = 300
    meter.end_step(left, [(a, 3), (b, 1)])
    now[0] = 350
    meter.end_step(right, [(c, 1)])
    assert (a.used_us, b.used_us, c.used_us) == (150, 50, 150)
    assert meter.totals() == (350, 0, 0)
    now[0] = 400
    loading = meter.open_account("s", "f", 1, InstanceState.STARTING)
    now[0] = 500
    meter.occupy(c)
    now[0] = 510
    meter.vacate(c)
    assert meter.totals() == (360, 100, 50) and c.used_us == 160
    assert (left.idle, right.idle, loading.loading, loading.idle) == (25, 25, 100, 0)


def test_an_interval_ends_before_the_step_under_way() -> None:
    now = [0]
    meter = GpuMeter("n0", 1, lambda: now[0], ORIGIN_S)
    account = meter.open_account("i", "f", 1, InstanceState.READY)
    call = meter.open_call(account, "a")
    now[0] = 1_000_000
    meter.start_step(account)
    now[0] = 3_000_000
    assert meter.longest_step_us() == 2_000_000
    meter.end_intervals()
    meter.end_intervals()
    meter.change_state(account, InstanceState.DRAINING)
    meter.end_step(account, [(call, 1)])
    meter.change_state(account, InstanceState.STOPPED, final=True)
    assert [
        (one.state, one.from_at - ORIGIN_S, one.to_at - ORIGIN_S, one.busy_us) for one in paid(meter)
    ] == [
        ("ready", 0.0, 1.0, 0),
        ("ready", 1.0, 1.0, 0),
        ("draining", 1.0, 3.0, 2_000_000),
    ]


def test_an_interval_that_names_many_calls_ends_early() -> None:
    now = [0]
    meter = GpuMeter("n0", 1, lambda: now[0], ORIGIN_S)
    account = meter.open_account("i", "f", 1, InstanceState.READY)
    reported = []
    meter.on_record(lambda: reported.append(meter.next_record()))
    for number in range(2 * MAX_PARTS + 1):
        call = meter.open_call(account, f"r{number}/0")
        meter.start_step(account)
        now[0] += 10
        meter.end_step(account, [(call, 1)])
        meter.close_calls([call])
    assert len(reported) == 2
    meter.change_state(account, InstanceState.STOPPED, final=True)
    assert [(len(one.calls), one.busy_us, one.final) for one in paid(meter)] == [
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
    accounts = [meter.open_account(f"i{number}", "f", 1, InstanceState.READY) for number in range(4)]
    calls = [[meter.open_call(one, f"{one.instance_id}/{i}") for i in range(3)] for one in accounts]

    def engine(number: int) -> None:
        for _ in range(500):
            meter.start_step(accounts[number])
            meter.end_step(accounts[number], [(call, 1) for call in calls[number]])

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for account, own in zip(accounts, calls, strict=True):
        assert account.busy == sum(call.used_us for call in own)
    meter.tick()
    assert sum(meter.totals()) + 3 >= sum(one.busy + one.idle for one in accounts) == sum(meter.totals()) - 3
