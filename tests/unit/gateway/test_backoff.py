"""The backoff table: waits, what arenas lack, the log, and deadlines. Pure."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.backoff import BackoffTable

SUBJECTS, NODES = ("f:1", "g:1"), ("n0", "n1", "n2")
PAIRS = st.tuples(st.sampled_from(SUBJECTS), st.sampled_from(NODES))
STEPS = st.lists(
    st.tuples(st.floats(0.0, 90.0), PAIRS, st.sampled_from(("failed", "succeeded"))), max_size=60
)


@given(STEPS)
def test_waits_double_from_the_first_to_the_longest_and_end_with_a_success(
    steps: list[tuple[float, tuple[str, str], str]],
) -> None:
    table, now = BackoffTable(first_s=1.0, max_s=60.0), 0.0
    runs: dict[tuple[str, str], tuple[int, float]] = {}  # failures in a row, and when the last wait ends
    for pause_s, pair, outcome in steps:
        now += pause_s
        table.expire(now)
        runs = {one: (count, until) for one, (count, until) in runs.items() if until + 60.0 > now}
        if outcome == "failed":
            count = runs.get(pair, (0, 0.0))[0]
            runs[pair] = count + 1, now + min(60.0, 2.0**count)
            table.failed(*pair, now)
        else:
            runs.pop(pair, None)
            table.succeeded(*pair)
        for one in [(subject, node) for subject in SUBJECTS for node in NODES]:
            until = runs.get(one, (0, 0.0))[1]
            assert table.retry_at(*one, now) == (until if until > now else None)
        for subject in SUBJECTS:
            assert table.count(subject) == sum(n for (other, _), (n, _) in runs.items() if other == subject)
        assert len(table) == len(runs)  # nothing else is remembered


@given(st.lists(st.tuples(st.floats(0.0, 40.0), PAIRS, st.integers(0, 1000)), max_size=40))
def test_a_start_needs_more_than_each_space_that_was_too_small_lately(
    steps: list[tuple[float, tuple[str, str], int]],
) -> None:
    table, now = BackoffTable(space_s=60.0), 0.0
    known: dict[str, list[tuple[float, int]]] = {subject: [] for subject in SUBJECTS}
    for pause_s, (subject, node), lacked in steps:
        now += pause_s
        table.expire(now)
        before = table.min_bytes(subject)
        table.no_space(subject, node, lacked, f"lacks {lacked}", now)
        known[subject].append((now, lacked))
        assert table.min_bytes(subject) == max(before, lacked + 1)
        for one in SUBJECTS:
            recent = [lack + 1 for at, lack in known[one] if now < at + 60.0]
            assert table.min_bytes(one) >= max(recent, default=0)
            assert bool(table.space_reason(one)) == bool(table.min_bytes(one))
    table.expire(now + 60.0)
    assert not any(table.min_bytes(subject) for subject in SUBJECTS) and len(table) == 0


@given(st.lists(st.tuples(PAIRS, st.integers(0, 8), st.booleans()), max_size=60))
def test_each_start_is_logged_once_and_in_order(steps: list[tuple[tuple[str, str], int, bool]]) -> None:
    table = BackoffTable()
    logged: dict[str, list[tuple[str, str]]] = {subject: [] for subject in SUBJECTS}
    for (subject, node), number, clears in steps:
        serial, name = table.serial, f"i{number}"
        if clears:
            table.clear_log(subject)
            logged[subject].clear()
            continue
        is_new = name not in {known for known, _ in logged[subject]}
        table.log(subject, name, node, "why")
        assert table.serial == serial + is_new
        assert [f.instance_id for f in table.failures(subject, serial)] == [name] * is_new
        if is_new:
            logged[subject].append((name, node))
        for one in SUBJECTS:
            assert [(f.instance_id, f.node) for f in table.failures(one)] == logged[one]
        assert all(table.retry_at(subject, one, 0.0) is None for one in NODES)  # a log entry blocks nothing


def test_a_reset_lets_all_nodes_of_a_subject_be_tried_at_once() -> None:
    table = BackoffTable()
    for node in NODES:
        table.failed("f:1", node, 0.0)
        table.failed("g:1", node, 0.0)
    table.reset("f:1")
    assert table.count("f:1") == 0 and table.count("g:1") == 3
    assert [table.retry_at("f:1", node, 0.5) for node in NODES] == [None, None, None]
    assert [table.retry_at("g:1", node, 0.5) for node in NODES] == [1.0, 1.0, 1.0]


def test_a_success_keeps_what_is_logged_and_what_is_needed() -> None:
    table = BackoffTable()
    table.failed("f:1", "n0", 0.0)
    table.no_space("f:1", "n0", 10, "too small", 0.0)
    table.log("f:1", "i0", "n0", "why")
    table.succeeded("f:1", "n0")
    assert table.retry_at("f:1", "n0", 0.0) is None and table.min_bytes("f:1") == 11
    assert [f.error for f in table.failures("f:1")] == ["why"]


def test_a_deadline_stays_until_it_is_cleared() -> None:
    table = BackoffTable()
    assert table.deadline("f:1", 5.0) == 5.0 and table.deadline("f:1", 9.0) == 5.0
    table.set_deadline("f:1", 6.0)
    assert table.deadline("f:1", 9.0) == 6.0
    table.clear_deadline("f:1")
    assert table.deadline("f:1", 9.0) == 9.0
