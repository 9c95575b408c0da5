"""Who takes which request: by free capacity, and evenly where pipelines end."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.targets import RequestTarget, UnfinishedRequest, choose_target, share_of, spread

REQUESTS = st.lists(st.integers(0, 4000), max_size=30).map(
    lambda sizes: [UnfinishedRequest(request_id=f"r{place}", tokens=size) for place, size in enumerate(sizes)]
)


def test_a_request_goes_where_it_ends_first() -> None:
    pipeline = RequestTarget(name="pipeline-0", rate=1.8, work_tokens=1800)
    busy = RequestTarget(name="n1", rate=1.0, work_tokens=1200)
    assert choose_target([busy, pipeline], 100) is pipeline  # 1900 / 1.8 against 1300
    idle = RequestTarget(name="n2", rate=1.0, work_tokens=100)
    assert choose_target([busy, pipeline, idle], 100) is idle
    full = RequestTarget(name="n3", rate=9.0, room=0)
    stuck = RequestTarget(name="n4", rate=0.0)
    assert choose_target([full, stuck], 1) is None
    assert (
        choose_target([RequestTarget(name="slow", rate=1.0), RequestTarget(name="quick", rate=2.0)], 0).name
        == "quick"
    )


def test_what_no_target_has_room_for_is_held() -> None:
    requests = [UnfinishedRequest(request_id=name, tokens=5, left=2) for name in ("a", "b", "c")]
    moves = spread(
        requests, [RequestTarget(name="n0", rate=1.0, room=1), RequestTarget(name="n1", rate=1.0, room=1)]
    )
    assert [move.target for move in moves] == ["n0", "n1", ""]


@given(requests=REQUESTS, count=st.integers(1, 6))
def test_places_of_one_rate_get_alike(requests: list[UnfinishedRequest], count: int) -> None:
    moves = spread(requests, [RequestTarget(name=f"n{place}", rate=1.0) for place in range(count)])
    assert sorted(move.request_id for move in moves) == sorted(request.request_id for request in requests)
    work = {f"n{place}": 0 for place in range(count)}
    sizes = {request.request_id: request.work for request in requests}
    for move in moves:
        work[move.target] += sizes[move.request_id]
    # Longest first: two places differ by one request at most.
    assert max(work.values()) - min(work.values()) <= max(sizes.values(), default=0)


@given(requests=REQUESTS, members=st.integers(1, 6))
def test_members_that_switch_one_after_the_other_take_alike(
    requests: list[UnfinishedRequest], members: int
) -> None:
    left, taken = list(requests), []
    for sharers in range(members, 0, -1):
        share = share_of(left, sharers)
        taken.append(sum(request.work for request in share))
        left = [request for request in left if request not in share]
    assert not left
    assert max(taken) - min(taken) <= 2 * max((request.work for request in requests), default=0)


def test_those_that_wait_for_their_first_token_go_first() -> None:
    requests = [
        UnfinishedRequest(request_id=f"r{place}", tokens=10, has_token=place < 3) for place in range(6)
    ]
    assert [one.request_id for one in share_of(requests, 3)] == ["r4", "r5"]
    assert len(share_of(requests, 1)) == 6
    few = [UnfinishedRequest(request_id=f"r{place}", tokens=10, has_token=place < 5) for place in range(6)]
    share = [one.request_id for one in share_of(few, 2)]
    assert len(share) == 3 and share[-1] == "r5"
