"""The page allocator and the scheduler: no page is lost, everyone finishes, in order of arrival."""

from hypothesis import given, settings
from hypothesis import strategies as st

from invoker.engine.kv_cache import PAGE_TOKENS, pages_for
from invoker.engine.pages import OutOfPages, PageAllocator
from invoker.engine.scheduler import Limits, Scheduler


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_allocator_never_loses_or_doubles_a_page(total: int, actions: list[tuple[bool, int]]) -> None:
    allocator = PageAllocator(total)
    held: list[tuple[int, ...]] = []
    for take, number in actions:
        if take:
            before = allocator.free
            try:
                held.append(allocator.allocate(number))
            except OutOfPages:
                assert number > before == allocator.free
        elif held:
            allocator.release(held.pop(number % len(held)))
        allocator.check_integrity()
        assert allocator.used == sum(len(pages) for pages in held)
    for pages in held:
        allocator.release(pages)
    assert allocator.free == total


def test_a_lone_sequence_gets_a_contiguous_run() -> None:
    allocator = PageAllocator(8)
    first = allocator.allocate(3)
    allocator.release(allocator.allocate(2))
    assert first + allocator.allocate(2) == (0, 1, 2, 3, 4)
    assert repr(allocator) == "<PageAllocator 5 of 8 used>"


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, Limits, list[tuple[int, int, int]]]:
    """Pages, limits, and sequences as (arrival step, prompt, tokens to generate) that fit the pages."""
    pages = draw(st.integers(2, 10))
    most = pages * PAGE_TOKENS
    sequences = draw(st.integers(1, 6))
    limits = Limits(sequences=sequences, prefill_tokens=draw(st.integers(1, 40)))
    load = st.tuples(st.integers(0, 20), st.integers(1, most - 1), st.integers(1, 60))
    rows = draw(st.lists(load, min_size=1, max_size=10))
    return pages, limits, [(a, p, min(n, most - p)) for a, p, n in sorted(rows)]


@settings(max_examples=150, deadline=None)
@given(workloads(), st.data())
def test_everyone_finishes_in_order_and_pages_come_back(
    workload: tuple[int, Limits, list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    pages, limits, rows = workload
    allocator = PageAllocator(pages)
    scheduler = Scheduler(limits, allocator)
    arriving = [(arrival, str(i), prompt, count) for i, (arrival, prompt, count) in enumerate(rows)]
    left = {name: count for _, name, _, count in arriving}
    length: dict[str, int] = {}
    cached: dict[str, int] = {}
    admitted: list[str] = []
    cancelled = data.draw(st.sampled_from([None, *left]))
    step = 0
    while left:
        while arriving and arriving[0][0] <= step:
            _, name, prompt, _ = arriving.pop(0)
            scheduler.add(name, prompt)
            length[name], cached[name] = prompt, 0
        if step == 7 and cancelled in scheduler:
            assert cancelled is not None
            scheduler.remove(cancelled)
            del left[cancelled]
        plan = scheduler.plan()
        scheduler.check_integrity()
        assert plan.chunks or len(scheduler) == 0, "work is there, but nothing runs"
        for name in plan.preempted:
            cached[name] = 0
        assert sum(chunk.count for chunk in plan.chunks) <= limits.prefill_tokens + len(plan.chunks)
        assert sum(chunk.count for chunk in plan.chunks if chunk.count > 1) <= limits.prefill_tokens
        assert len(plan.chunks) <= limits.sequences
        owned = [page for chunk in plan.chunks for page in chunk.pages]
        assert len(owned) == len(set(owned))
        for chunk in plan.chunks:
            name = chunk.request_id
            assert name not in plan.preempted
            assert chunk.start == cached[name] and chunk.count >= 1
            assert chunk.start + chunk.count <= len(chunk.pages) * PAGE_TOKENS
            assert chunk.last == (chunk.start + chunk.count == length[name])
            cached[name] += chunk.count
            if name not in admitted:
                admitted.append(name)
        scheduler.ran()
        for chunk in plan.chunks:
            if chunk.last:
                name = chunk.request_id
                left[name] -= 1
                length[name] += 1
                if left[name] == 0:
                    del left[name]
                    scheduler.remove(name)
                else:
                    scheduler.append_token(name)
        scheduler.check_integrity()
        step += 1
        assert step < 20_000, "no progress"
    assert admitted == sorted(admitted, key=int)
    assert allocator.used == 0


def test_decoding_goes_on_while_a_long_prompt_is_prefilled() -> None:
    scheduler = Scheduler(Limits(sequences=4, prefill_tokens=19), PageAllocator(100))
    scheduler.add("short", 3)
    assert [(c.request_id, c.count, c.last) for c in scheduler.plan().chunks] == [("short", 3, True)]
    scheduler.ran()
    scheduler.append_token("short")
    scheduler.add("long", 50)
    for count, last in ((19, False), (19, False), (12, True)):
        chunks = scheduler.plan().chunks
        assert [(c.request_id, c.count) for c in chunks] == [("short", 1), ("long", count)]
        assert chunks[1].last == last
        scheduler.ran()
        scheduler.append_token("short")


def test_the_youngest_gives_way_and_is_computed_again() -> None:
    allocator = PageAllocator(4)
    scheduler = Scheduler(Limits(sequences=4, prefill_tokens=64), allocator)
    scheduler.add("old", 32)
    scheduler.add("young", 32)
    assert len(scheduler.plan().chunks) == 2
    scheduler.ran()
    for name in ("old", "young"):
        scheduler.append_token(name)
    plan = scheduler.plan()
    assert plan.preempted == ("young",)
    assert [c.request_id for c in plan.chunks] == ["old"]
    assert repr(scheduler) == "<Scheduler 1 running, 1 waiting, <PageAllocator 3 of 4 used>>"
    scheduler.ran()
    scheduler.remove("old")
    chunk = scheduler.plan().chunks[0]
    assert (chunk.request_id, chunk.start, chunk.count) == ("young", 0, 33)
    assert len(chunk.pages) == pages_for(33)
