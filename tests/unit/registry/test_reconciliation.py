"""Conservation: what instances were busy with is what requests and lost calls used, and nothing else."""

from dataclasses import replace

import msgspec
import pytest

from registry.accounting.presence import Presence
from registry.accounting.reconciliation import BalanceVerdict, reconcile
from registry.accounting.usage_reader import reconcile_ledger
from registry.memory.state import MemoryState
from tests.fixtures.usage import NOW, done, interval, ledger, lost, part, us, used


def test_an_instance_that_does_not_add_up_is_named():
    requests, intervals, calls = ledger()
    found = reconcile(requests, intervals, calls[1:])
    assert found.verdict is BalanceVerdict.WRONG
    (wrong,) = [one for one in found.instances if one.verdict is not BalanceVerdict.EXACT]
    assert (wrong.instance_id, wrong.missing_us) == ("i0", 1_000_020 - 20)
    assert "i0 on n0 is wrong" in str(found)
    # The node knows that the call is settled: so it is wrong even while the instance lives.
    assert reconcile(requests, intervals, calls[1:], live={"i0": "n0"}).verdict is BalanceVerdict.WRONG
    twice = [*requests, done("f", used(1_000_000, "f/0"), end=20)]
    assert reconcile(twice, intervals, calls).verdict is BalanceVerdict.WRONG
    assert reconcile(twice, intervals, calls, live={"i0": "n0"}).verdict is BalanceVerdict.WRONG
    stolen = [*requests[1:], msgspec.structs.replace(requests[0], request_id="f")]
    assert reconcile(stolen, intervals, calls, live={"i1": "n0"}).verdict is BalanceVerdict.WRONG


def test_nothing_is_wrong_without_a_proof():
    whole = interval(end=20, calls=(part("r0/0", 0, 500),))
    record = done("r0", used(500))
    more = done("r1", used(700, "r1/0"))
    for known, live in [([], {"i0": "n0"}), ([record, more], {"i0": "n0"}), ([record, more], {})]:
        assert reconcile(known, [whole], [], live=live).verdict is BalanceVerdict.OPEN
    # Its node is dead, and all of its time is written.
    last = replace(whole, final=True)
    assert reconcile([record, more], [last], []).verdict is BalanceVerdict.WRONG
    assert (
        reconcile([], [last], []).verdict is BalanceVerdict.OPEN
    )  # the record of its last call is on its way
    # These can be reported of any instance.
    after = interval(start=20, end=30, earlier_us=20_000_000)
    for wrong in (
        [replace(whole, busy_us=501, idle_us=whole.idle_us - 1)],
        [whole, replace(after, from_at=NOW + 25)],
        [whole, replace(after, earlier_us=20_000_001)],
        [replace(whole, calls=(part("r0/0", 0, 400, over=True), part("r2/0", 0, 100)))],
        [replace(whole, calls=(part("r0/0", 100, 600),))],
    ):
        assert reconcile([record], wrong, [], live={"i0": "n0"}).verdict is BalanceVerdict.WRONG
    # Clocks of another process of the node, or of a gateway, prove nothing.
    earlier = interval("i1", 10, 20, epoch=2, final=True)
    late = msgspec.structs.replace(record, started_at=NOW - 1e6, ended_at=NOW - 1e6)
    assert reconcile([late], [last, earlier], []).verdict is BalanceVerdict.EXACT


def test_records_of_calls_that_ended_with_their_instance_cannot_swap_time():
    last = interval(calls=(part("a/0", 0, 500), part("b/0", 0, 300)), final=True)
    right = [done("a", used(500, "a/0")), done("b", used(300, "b/0"))]
    assert reconcile(right, [last], []).verdict is BalanceVerdict.EXACT
    swapped = [done("a", used(400, "a/0")), done("b", used(400, "b/0"))]
    found = reconcile(swapped, [last], [])
    assert found.verdict is BalanceVerdict.WRONG and found.instances[0].missing_us == 0
    assert "b/0 used 300 us, but its record has 400" in str(found)
    # Of one that lives on, the next interval may say more of a call, and a record come late.
    living = replace(last, final=False)
    assert reconcile(swapped, [living], [], live={"i0": "n0"}).verdict is BalanceVerdict.OPEN
    # What no record has of a call may be reported as lost; but not of another one.
    lesser = [done("a", used(400, "a/0")), right[1]]
    assert reconcile(lesser, [last], []).verdict is BalanceVerdict.OPEN
    assert reconcile(lesser, [last], [lost("a/0", 500)]).verdict is BalanceVerdict.EXACT
    assert reconcile(lesser, [last], [lost("b/0", 400)]).verdict is BalanceVerdict.WRONG


def test_a_record_of_a_call_that_no_interval_names_is_reported():
    last = interval(calls=(part("a/0", 0, 500),), final=True)
    named, unnamed = done("a", used(500, "a/0")), done("b", used(100, "b/0"))
    short = done("a", used(400, "a/0"))
    for records in ([named, unnamed], [short, unnamed]):
        found = reconcile(records, [last], [])
        assert found.verdict is BalanceVerdict.WRONG and "used 100 us" in str(found)
    assert reconcile([named], [last], [lost("b/0", 100)]).verdict is BalanceVerdict.WRONG
    living = replace(last, final=False)
    assert reconcile([named, unnamed], [living], [], live={"i0": "n0"}).verdict is BalanceVerdict.OPEN
    assert reconcile([named, unnamed], [living], []).verdict is BalanceVerdict.OPEN
    # Nothing at all is known of its instance: a journal may have it.
    assert reconcile([named], [], []).verdict is BalanceVerdict.OPEN


def test_a_missing_first_or_last_interval_is_reported():
    first = interval(end=20, idle_us=5_000_000)
    last = interval(start=20, end=30, earlier_us=5_000_000, calls=(part("a/0", 0, 500),), final=True)
    records = [done("a", used(500, "a/0"))]
    found = reconcile(records, [last], [])
    assert found.verdict is BalanceVerdict.WRONG and "its first intervals are missing, of 5000000 us" in str(
        found
    )
    first = replace(first, idle_us=20_000_000)
    found = reconcile([], [first], [])
    assert found.verdict is BalanceVerdict.OPEN and "not written yet" in str(found)
    assert reconcile([], [first], [], live={"i0": "n0"}).verdict is BalanceVerdict.EXACT


@pytest.mark.parametrize("reported", ["recorded", "lost"])
async def test_a_page_may_end_between_intervals_that_end_together(reported: str) -> None:
    """The empty one at the end of a life reports earlier calls as over."""
    state = MemoryState()
    for number in range(300):
        name, call = f"i{number}", f"r{number}/0"
        await state.add_interval(interval(name, calls=(part(call, 0, 700),), idle_us=199_300))
        empty = interval(name, 60, 60, state="draining", calls=(part(call, 700, 700, over=True),))
        await state.add_interval(replace(empty, final=True, earlier_us=200_000))
        if reported == "recorded":
            await state.add_request(done(f"r{number}", used(700, call, name)))
        else:
            await state.add_lost_call(lost(call, 700, name))
    found = await reconcile_ledger(state, dict)
    assert {one.verdict for one in found.instances} == {BalanceVerdict.EXACT}, str(found)


def test_a_call_that_was_recorded_after_all_is_not_lost():
    whole = interval(calls=(part("r0/0", 0, 500),), final=True)
    for recorded, reported in [((used(500),), 500), ((used(200),), 500), ((), 500)]:
        found = reconcile([done("r0", *recorded)], [whole], [lost("r0/0", reported)])
        assert found.verdict is BalanceVerdict.EXACT, str(found)
        assert found.instances[0].lost_us == 500 - sum(part.gpu_us for part in recorded)


def test_a_node_was_allocated_while_it_held_an_instance():
    shared = [interval(name, 0, 10, idle_us=5_000_000, final=True) for name in ("i0", "i1")]
    apart = interval("i2", 20, 30, final=True)
    presence = Presence()
    for stay in ((0, 10), (0, 10), (20, 30), (15, 40)):
        presence.add(us(stay[0]), us(stay[1]), 5)
    assert (presence.present_us, presence.allocated_us, presence.intervals) == (35_000_000, 20, 4)
    assert reconcile([], [*shared, apart], []).verdict is BalanceVerdict.EXACT
    found = reconcile([], [*shared, replace(apart, idle_us=9_000_000)], [])
    assert found.verdict is BalanceVerdict.WRONG and "node n0 is wrong" in str(found)
    other = {"i9": "n0"}  # shares the node, and nothing of it is written down yet
    assert reconcile([], [replace(apart, idle_us=9)], [], live=other).verdict is BalanceVerdict.OPEN
    assert reconcile([], [*shared, replace(apart, idle_us=9_997_100)], []).verdict is BalanceVerdict.EXACT
