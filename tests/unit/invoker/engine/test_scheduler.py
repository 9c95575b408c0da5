"""The page allocator and the scheduler: no page is lost, each sequence finishes, tenants share prefill."""

from hypothesis import given, settings
from hypothesis import strategies as st

from invoker.engine.kv.cache import PAGE_TOKENS, pages_for
from invoker.engine.kv.pages import OutOfPages, PageAllocator
from invoker.engine.scheduling.scheduler import Scheduler, StepLimits


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=60))
def test_allocator_never_loses_or_doubles_a_page(total: int, actions: list[tuple[int, int]]) -> None:
    allocator = PageAllocator(total)
    held: list[tuple[int, ...]] = []
    for kind, number in actions:
        before = allocator.free
        try:
            if kind == 0:
                held.append(allocator.allocate(number, 2 * number))
            elif held and kind == 1:
                index = number % len(held)
                pages = held[index]
                held[index] += allocator.grow(pages, number) if pages else allocator.allocate(number)
            elif held:
                allocator.release(held.pop(number % len(held)))
        except OutOfPages:
            assert number > before == allocator.free
        allocator.check_integrity()
        taken = [page for pages in held for page in pages]
        assert len(taken) == len(set(taken)) == allocator.used
        assert set(taken) <= set(range(total))
    for pages in held:
        allocator.release(pages)
    allocator.check_integrity()
    assert allocator.free == total
    # No claim is left behind: all pages are one run again.
    assert allocator.allocate(total, total) == tuple(range(total))


def _apart(pages: tuple[int, ...]) -> bool:
    return pages != tuple(range(pages[0], pages[0] + len(pages)))


def test_sequences_that_grow_in_turns_keep_their_pages_adjacent() -> None:
    allocator = PageAllocator(30)
    held = [allocator.allocate(2, most) for most in (10, 12, 8)]
    for _ in range(6):
        held = [pages + allocator.grow(pages, 1) for pages in held]
    assert not any(map(_apart, held)), held
    # The remaining claim of one that ended early goes to the next that fits.
    allocator.release(held[1])
    assert allocator.allocate(3, 12) == (10, 11, 12)


def test_claims_delay_no_sequence() -> None:
    allocator = PageAllocator(12)
    first = allocator.allocate(2, 10)
    second = allocator.allocate(6, 6)  # fits nowhere in one piece but behind the first
    assert len(second) == 6 and not set(first) & set(second)
    first += allocator.grow(first, 4)
    assert allocator.free == 0 and sorted(first + second) == list(range(12))
    allocator.release(second)
    allocator.release(first)
    assert allocator.allocate(12, 12) == tuple(range(12))


def test_a_lone_sequence_gets_a_contiguous_run() -> None:
    allocator = PageAllocator(8)
    first = allocator.allocate(3)
    allocator.release(allocator.allocate(2))
    assert first + allocator.allocate(2) == (0, 1, 2, 3, 4)
    assert repr(allocator) == "<PageAllocator 5 of 8 used>"


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, StepLimits, list[tuple[int, int, int, str]]]:
    """Draw pages, limits, and fitting sequences as (arrival step, prompt, tokens to generate, tenant)."""
    pages = draw(st.integers(2, 10))
    most = pages * PAGE_TOKENS
    sequences = draw(st.integers(1, 6))
    prefill = draw(st.integers(1, 40))
    limits = StepLimits(
        sequences=sequences, prefill_tokens=prefill, shared_prefill_tokens=draw(st.integers(1, prefill))
    )
    tenants = st.sampled_from("abc"[: draw(st.integers(1, 3))])
    load = st.tuples(st.integers(0, 20), st.integers(1, most - 1), st.integers(1, 60), tenants)
    rows = draw(st.lists(load, min_size=1, max_size=10))
    return pages, limits, [(a, p, min(n, most - p), tenant) for a, p, n, tenant in sorted(rows)]


@settings(max_examples=150)
@given(workloads(), st.data())
def test_every_sequence_finishes_each_tenant_in_order_and_pages_come_back(
    workload: tuple[int, StepLimits, list[tuple[int, int, int, str]]], data: st.DataObject
) -> None:
    pages, limits, rows = workload
    allocator = PageAllocator(pages)
    scheduler = Scheduler(limits, allocator)
    arriving = [
        (arrival, f"{tenant}{i:02}", prompt, n) for i, (arrival, prompt, n, tenant) in enumerate(rows)
    ]
    left = {name: count for _, name, _, count in arriving}
    length: dict[str, int] = {}
    cached: dict[str, int] = {}
    admitted: list[str] = []
    cancelled = data.draw(st.sampled_from([None, *left]))
    step = 0
    while left:
        while arriving and arriving[0][0] <= step:
            _, name, prompt, _ = arriving.pop(0)
            scheduler.add(name, prompt, name[0])
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
        scheduler.step_done()
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
    for tenant in "abc":
        own = [name for name in admitted if name[0] == tenant]
        assert own == sorted(own)
    assert allocator.used == 0


def make_scheduler(sequences: int, prefill: int, pages: int, shared: int | None = None) -> Scheduler:
    """`shared` (all of them): the tokens of a step's prompts while others decode."""
    limits = StepLimits(
        sequences=sequences,
        prefill_tokens=prefill,
        shared_prefill_tokens=prefill if shared is None else shared,
    )
    return Scheduler(limits, PageAllocator(pages))


def end_step(scheduler: Scheduler, *sampled: str) -> None:
    scheduler.step_done()
    for name in sampled:
        scheduler.append_token(name)


def test_decoding_goes_on_while_a_long_prompt_is_prefilled() -> None:
    scheduler = make_scheduler(4, 19, 100)
    scheduler.add("short", 3)
    assert [(c.request_id, c.count, c.last) for c in scheduler.plan().chunks] == [("short", 3, True)]
    end_step(scheduler, "short")
    scheduler.add("long", 50)
    for count, last in ((19, False), (19, False), (12, True)):
        chunks = scheduler.plan().chunks
        assert [(c.request_id, c.count) for c in chunks] == [("short", 1), ("long", count)]
        assert chunks[1].last == last
        end_step(scheduler, "short")


def test_the_youngest_is_preempted_and_recomputed() -> None:
    allocator = PageAllocator(4)
    scheduler = Scheduler(StepLimits(sequences=4, prefill_tokens=64, shared_prefill_tokens=64), allocator)
    scheduler.add("old", 32)
    scheduler.add("young", 32)
    assert len(scheduler.plan().chunks) == 2
    end_step(scheduler, "old", "young")
    plan = scheduler.plan()
    assert plan.preempted == ("young",)
    assert [c.request_id for c in plan.chunks] == ["old"]
    assert repr(scheduler) == "<Scheduler 1 running, 1 waiting, <PageAllocator 3 of 4 used>>"
    scheduler.step_done()
    scheduler.remove("old")
    chunk = scheduler.plan().chunks[0]
    assert (chunk.request_id, chunk.start, chunk.count) == ("young", 0, 33)
    assert len(chunk.pages) == pages_for(33)


def test_a_newcomer_is_not_behind_the_prompts_of_a_tenant_that_sent_many() -> None:
    scheduler = make_scheduler(16, 512, 1000, shared=64)
    for i in range(8):
        scheduler.add(f"flood{i}", 500, "flood")
    # From an idle engine a whole step; then short ones.
    assert [(c.request_id, c.count) for c in scheduler.plan().chunks] == [("flood0", 500), ("flood1", 12)]
    end_step(scheduler, "flood0")
    for _ in range(4):
        chunks = scheduler.plan().chunks
        assert [(c.request_id, c.count) for c in chunks] == [("flood0", 1), ("flood1", 64)]
        end_step(scheduler, "flood0")
    scheduler.add("quiet", 300, "quiet")
    # Its whole prompt runs in the next step, and the other tenant's goes on in the one after.
    assert [(c.request_id, c.count) for c in scheduler.plan().chunks] == [("quiet", 300)]
    end_step(scheduler, "quiet")
    chunks = scheduler.plan().chunks
    assert [(c.request_id, c.count) for c in chunks] == [("flood0", 1), ("flood1", 64), ("quiet", 1)]
    scheduler.check_integrity()


def test_what_a_flow_ran_while_no_other_had_a_backlog_is_not_charged() -> None:
    scheduler = make_scheduler(8, 512, 1000, shared=64)
    for name in ("flood0", "flood1"):
        scheduler.add(name, 10, "flood")
    scheduler.plan()
    scheduler.step_done()
    for quiet in ("quiet0", "quiet1"):
        for name in ("flood0", "flood1"):
            scheduler.append_token(name)
        scheduler.add(quiet, 400, "quiet")
        assert [c.count for c in scheduler.plan().chunks] == [400]
        scheduler.step_done()
        scheduler.remove(quiet)
        assert [c.count for c in scheduler.plan().chunks] == [1, 1]  # no sequence has a prompt now
        scheduler.step_done()
    for name in ("flood0", "flood1"):
        scheduler.append_token(name)
    scheduler.add("flood2", 100, "flood")
    scheduler.add("quiet2", 400, "quiet")
    assert [c.request_id for c in scheduler.plan().chunks] == ["quiet2"]
    end_step(scheduler, "quiet2")
    scheduler.add("other", 400, "other")  # decoding waits for one newcomer, and then continues
    assert [c.count for c in scheduler.plan().chunks] == [1, 1, 1, 400]


@given(
    st.lists(st.integers(2, 6), min_size=2, max_size=4),
    st.integers(16, 100),
    st.lists(st.integers(100, 400), min_size=1),
)
def test_backlogged_tenants_run_as_much_as_each_other(
    widths: list[int], turn: int, lengths: list[int]
) -> None:
    """For any number and length of prompts."""
    limits = StepLimits(sequences=64, prefill_tokens=100, shared_prefill_tokens=turn)
    scheduler = Scheduler(limits, PageAllocator(2000))
    served = dict.fromkeys(range(len(widths)), 0)
    serial = 0

    def add(tenant: int) -> None:
        nonlocal serial
        scheduler.add(f"{tenant}-{serial}", lengths[serial % len(lengths)], str(tenant))
        serial += 1

    for tenant, width in enumerate(widths):
        for _ in range(width):
            add(tenant)
    for _ in range(60):
        plan = scheduler.plan()
        scheduler.step_done()
        for chunk in plan.chunks:
            tenant = int(chunk.request_id.split("-")[0])
            served[tenant] += chunk.count
            if chunk.last:  # it needs only one token
                scheduler.remove(chunk.request_id)
                add(tenant)
        assert max(served.values()) - min(served.values()) <= 2 * max(turn, *lengths)


@settings(max_examples=40)
@given(
    st.integers(2, 5),
    st.integers(4, 60),
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20)), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(1, 450), st.integers(1, 9), st.integers(0, 9)), min_size=2, max_size=6),
)
def test_a_lone_newcomer_waits_for_what_it_owes_a_flood_and_one_short_step_at_most(
    width: int, turn: int, flood: list[tuple[int, int]], quiet: list[tuple[int, int, int]]
) -> None:
    """A flood is always `width` wide; the other's (prompt, tokens, pause in steps) follow each other."""
    prefill = 200
    limits = StepLimits(sequences=16, prefill_tokens=prefill, shared_prefill_tokens=turn)
    scheduler = Scheduler(limits, PageAllocator(1000))
    left: dict[str, int] = {}
    stalled: dict[str, int] = {}  # steps since a sequence of the flood that decodes had a token
    serial = 0

    def add(tenant: str, prompt: int, tokens: int) -> None:
        nonlocal serial
        scheduler.add(f"{tenant}{serial}", prompt, tenant)
        left[f"{tenant}{serial}"] = tokens
        serial += 1

    def step() -> int:
        """Run one step; return the number of prompt tokens of the flood."""
        plan, of_prompts = scheduler.plan(), 0
        scheduler.step_done()
        ran = {chunk.request_id for chunk in plan.chunks}
        for name in stalled:
            stalled[name] = 0 if name in ran else stalled[name] + 1
            assert stalled[name] <= 1, "what decodes is paused twice in a row"
        for chunk in plan.chunks:
            name = chunk.request_id
            last_token = chunk.last and chunk.count == 1  # runs as if it decoded, beside all else
            if name.startswith("f") and name not in stalled and not last_token:
                of_prompts += chunk.count
            if chunk.last:
                left[name] -= 1
                if left[name] == 0:
                    scheduler.remove(name)
                    del left[name]
                    stalled.pop(name, None)
                    if name.startswith("f"):
                        add("f", *flood[serial % len(flood)])
                else:
                    scheduler.append_token(name)
                    if name.startswith("f"):
                        stalled.setdefault(name, 0)
        scheduler.check_integrity()
        return of_prompts

    for number in range(width):
        add("f", *flood[number % len(flood)])
    step()
    owed = 0  # what the newcomer's tenant ran before, and the flood has not run since
    for prompt, tokens, pause in quiet:
        for _ in range(pause):
            owed = max(0, owed - step())
        name = f"q{serial}"
        add("q", prompt, tokens)
        waited, wanted = 0, left[name]
        while left.get(name, 0) == wanted:
            waited += step()
        assert waited <= owed + turn
        owed = max(0, owed - waited) + prompt
        while name in left:
            owed = max(0, owed - step())


def test_a_tenant_that_left_comes_back_with_what_it_ran_before_but_saves_nothing_up() -> None:
    scheduler = make_scheduler(8, 64, 100)
    scheduler.add("a0", 200, "a")
    scheduler.add("b0", 64, "b")
    scheduler.plan()
    scheduler.step_done()
    assert [c.request_id for c in scheduler.plan().chunks] == ["b0"]
    scheduler.step_done()
    scheduler.remove("b0")
    scheduler.add("a1", 200, "a")
    scheduler.add("b1", 64, "b")  # both ran 64 tokens, and it has fewer sequences here
    assert [c.request_id for c in scheduler.plan().chunks] == ["b1"]
    scheduler.step_done()
    scheduler.remove("b1")
    scheduler.add("b2", 64, "b")
    assert [c.request_id for c in scheduler.plan().chunks] == ["a0"]
    scheduler.step_done()
    for name in ("a0", "a1", "b2"):
        scheduler.remove(name)
    scheduler.add("a2", 64, "a")
    scheduler.add("b3", 64, "b")  # with no sequence left all tags are reset
    assert [c.request_id for c in scheduler.plan().chunks] == ["a2"]


def test_a_tenant_that_runs_nothing_gets_pages_from_one_that_holds_most() -> None:
    scheduler = make_scheduler(8, 640, 8)
    for i in range(4):
        scheduler.add(f"flood{i}", 2 * PAGE_TOKENS, "flood")
    assert len(scheduler.plan().chunks) == 4
    scheduler.step_done()
    scheduler.add("quiet", 3 * PAGE_TOKENS, "quiet")
    plan = scheduler.plan()
    assert plan.preempted == ("flood3", "flood2")
    assert plan.chunks[-1].request_id == "quiet" and plan.chunks[-1].last
    scheduler.check_integrity()
    scheduler.step_done()
    scheduler.add("more", PAGE_TOKENS, "quiet")  # more than one sequence has to wait
    assert scheduler.plan().preempted == ()
    scheduler.check_integrity()


def test_a_tenant_that_runs_nothing_gets_a_place_from_one_that_has_most() -> None:
    scheduler = make_scheduler(4, 64, 100)
    for i in range(5):
        scheduler.add(f"flood{i}", 8, "flood")
    assert len(scheduler.plan().chunks) == 4
    scheduler.step_done()
    scheduler.add("quiet", 8, "quiet")
    plan = scheduler.plan()
    assert plan.preempted == ("flood3",)
    assert [c.request_id for c in plan.chunks] == ["quiet"]
    scheduler.check_integrity()


@given(
    st.lists(st.tuples(st.integers(2, 300), st.floats(0.05, 1.0), st.booleans()), min_size=1, max_size=20),
    st.integers(1, 32),
)
def test_prompts_that_enter_later_count_by_their_layers(
    prompts: list[tuple[int, float, bool]], shared: int
) -> None:
    limits = StepLimits(sequences=64, prefill_tokens=shared, shared_prefill_tokens=shared)
    scheduler = Scheduler(limits, PageAllocator(1000))
    shares: dict[str, float] = {}
    for number, (length, share, enters) in enumerate(prompts):
        shares[name := str(number)] = share if enters else 1.0
        scheduler.add(name, length, share=shares[name])
    ran: dict[str, int] = dict.fromkeys(shares, 0)
    while ran:
        chunks = scheduler.plan().chunks
        costs = [
            chunk.count * shares[chunk.request_id]
            for chunk in chunks
            if prompts[int(chunk.request_id)][0] - ran[chunk.request_id] > 1  # else it counts as decoding
        ]
        entering = any(shares[name] < 1 for name in ran)
        most = limits.entering_tokens if entering else shared
        assert chunks and sum(costs) <= most + 1 + 1e-9  # the last one may exceed it by a token
        for chunk in chunks:
            ran[chunk.request_id] += chunk.count
        scheduler.step_done()
        for chunk in chunks:
            if chunk.last:
                assert ran.pop(chunk.request_id) == prompts[int(chunk.request_id)][0]
                scheduler.remove(chunk.request_id)
        scheduler.check_integrity()
