"""Several plans in flight: their order, and the sequences that are not preempted."""

from invoker.engine.kv.cache import PAGE_TOKENS
from invoker.engine.kv.pages import PageAllocator
from invoker.engine.scheduling.scheduler import Scheduler, StepLimits, StepPlan


def _scheduler(pages: int = 100, sequences: int = 8) -> Scheduler:
    limits = StepLimits(sequences=sequences, prefill_tokens=32, shared_prefill_tokens=32)
    return Scheduler(limits, PageAllocator(pages))


def _runs(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.request_id, chunk.start, chunk.count) for chunk in plan.chunks]


def test_chunks_follow_at_once_and_tokens_when_the_last_has_run() -> None:
    scheduler = _scheduler()
    scheduler.add("a", 40)
    assert _runs(scheduler.plan()) == [("a", 0, 32)]
    assert _runs(scheduler.plan()) == [("a", 32, 8)]
    assert _runs(scheduler.plan()) == []  # not in flight, so it does not run
    scheduler.step_done()
    assert _runs(scheduler.plan()) == []
    scheduler.step_done()
    scheduler.append_token("a")
    assert _runs(scheduler.plan()) == [("a", 40, 1)]


def test_the_sequence_that_waited_longest_decodes_next() -> None:
    scheduler = _scheduler()
    for name in "abcd":
        scheduler.add(name, 1)
    assert len(scheduler.plan().chunks) == scheduler.running == 4
    for name in "abcd":
        scheduler.append_token(name)
    order = []
    for _ in range(4):
        scheduler.step_done()
        for chunk in scheduler.plan(2).chunks:
            scheduler.append_token(chunk.request_id)  # so that all could run each time
            order.append(chunk.request_id)
    assert order == ["a", "b", "c", "d", "a", "b", "c", "d"]


def test_a_sequence_in_flight_is_not_preempted() -> None:
    scheduler = _scheduler(pages=2)
    for name in "ab":
        scheduler.add(name, PAGE_TOKENS)
    assert _runs(scheduler.plan()) == [("a", 0, 16), ("b", 0, 16)]
    scheduler.step_done()
    for name in "ab":
        scheduler.append_token(name)
    # Both need a page. The younger is preempted, and its page is enough for the older one alone.
    plan = scheduler.plan()
    assert plan.preempted == ("b",) and _runs(plan) == [("a", 16, 1)] and not plan.stalled
    scheduler.step_done()
    scheduler.check_integrity()

    scheduler = _scheduler(pages=3)
    scheduler.add("a", PAGE_TOKENS)
    scheduler.add("b", PAGE_TOKENS + 1)
    assert _runs(scheduler.plan()) == [("a", 0, 16), ("b", 0, 16)]
    assert _runs(scheduler.plan(1)) == [("b", 16, 1)]
    scheduler.step_done()
    scheduler.append_token("a")
    plan = scheduler.plan()
    assert (plan.stalled, plan.preempted, plan.chunks) == (True, (), ())
    scheduler.step_done()
    plan = scheduler.plan()
    assert (plan.stalled, plan.preempted, _runs(plan)) == (False, ("b",), [("a", 16, 1)])
    scheduler.check_integrity()


def test_a_plan_without_remaining_sequences_ends_all_the_same() -> None:
    scheduler = _scheduler()
    scheduler.add("a", 20)
    scheduler.plan()
    scheduler.remove("a")
    scheduler.add("a", 5)
    assert _runs(scheduler.plan()) == [("a", 0, 5)]
    scheduler.step_done()
    scheduler.step_done()
    scheduler.step_done()  # nothing is in flight
    scheduler.append_token("a")
    assert _runs(scheduler.plan()) == [("a", 5, 1)]
    assert scheduler.cached_pages("a")[1] == 6


def test_imported_tokens_are_not_run_until_a_preemption() -> None:
    scheduler = _scheduler(pages=3)
    scheduler.add("a", 16, imported=15)
    scheduler.add("b", 30, imported=20)
    assert _runs(scheduler.plan()) == [("a", 15, 1), ("b", 20, 10)]
    scheduler.step_done()
    scheduler.append_token("a")
    scheduler.append_token("b")
    plan = scheduler.plan()
    assert plan.preempted == ("b",) and _runs(plan) == [("a", 16, 1)]
    scheduler.step_done()
    scheduler.remove("a")
    assert _runs(scheduler.plan()) == [("b", 0, 31)]
