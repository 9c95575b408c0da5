"""One node's part in a cast."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacast.bitfield import MAX_BLOCKS, Bitfield, blocks_in, to_bits
from rdmacast.cast.session import Session, SessionState
from rdmacast.cast.session_actions import DropPull, PublishBitfield, RequestHave, StartPull
from rdmacast.cast.session_settings import SessionSettings
from rdmacast.errors import ProtocolError
from rdmacast.plan.plan import CastShape, TransferPlan
from rdmacast.plan.planners.catalog import PLANNERS
from rdmacast.plan.topology import NodeTopology
from tests.fixtures.session_network import Network


def plan_of(name: str, nodes: int, blocks: int, sources: int = 1) -> TransferPlan:
    return PLANNERS[name].plan(CastShape(nodes=nodes, sources=tuple(range(sources)), blocks=blocks))


@st.composite
def plans(draw: st.DrawFn) -> TransferPlan:
    nodes = draw(st.integers(2, 9))
    sources = draw(st.integers(1, min(3, nodes - 1)))
    name, blocks = draw(st.sampled_from(list(PLANNERS))), draw(st.integers(1, 12))
    if not draw(st.booleans()):
        return plan_of(name, nodes, blocks, sources)
    places = draw(
        st.lists(st.sampled_from([("a", ""), ("b", ""), ("b", "x")]), min_size=nodes, max_size=nodes)
    )
    sites = tuple(NodeTopology(leaf=leaf, domain=domain) for leaf, domain in places)
    shape = CastShape(nodes=nodes, sources=tuple(range(sources)), blocks=blocks, sites=sites)
    return PLANNERS["multi-chain"].plan(shape)


@given(plan=plans(), seed=st.integers(0, 1 << 30), loss=st.sampled_from([0.0, 0.3]))
@settings(max_examples=60)
def test_in_any_order_of_messages_all_complete_and_each_block_is_read_once(
    plan: TransferPlan, seed: int, loss: float
) -> None:
    network = Network(plan, Random(seed), loss=loss)
    network.run()
    assert network.states() == {SessionState.COMPLETE}
    assert network.read == len(plan.transfers)


@given(
    plan=plans(),
    seed=st.integers(0, 1 << 30),
    deaths=st.integers(0, 4),
    loss=st.sampled_from([0.0, 0.3]),
    damage=st.sampled_from([0.0, 0.2]),
    failure=st.sampled_from([0.0, 0.2]),
    return_one=st.booleans(),
)
@settings(max_examples=120)
def test_with_losses_and_deaths_all_complete_or_name_what_nobody_holds(
    plan: TransferPlan,
    seed: int,
    deaths: int,
    loss: float,
    damage: float,
    failure: float,
    return_one: bool,
) -> None:
    returned = return_one and deaths > 0
    random = Random(seed)
    limits = SessionSettings(max_failures=1000)
    network = Network(plan, random, loss=loss, damage=damage, failure=failure, settings=limits)
    for _ in range(min(deaths, plan.shape.nodes - 1)):
        for _ in range(random.randrange(40 * plan.shape.nodes)):
            network.step()
        dead = random.choice(network.alive)
        network.kill(dead)
        if return_one:
            network.begin(dead, epoch=network.lives[dead])
            return_one = False
    network.run()
    held = set().union(*(set(range(plan.shape.blocks)) - set(s.missing) for s in network.sessions.values()))
    for session in network.sessions.values():
        assert session.state in (SessionState.FAILED, SessionState.COMPLETE)
        # Of one that came back the others may hear only after they had to give up.
        if session.state is SessionState.FAILED and not returned:
            assert session.unreachable and not held & set(session.unreachable)
    if len(held) == plan.shape.blocks and not returned:
        assert network.states() == {SessionState.COMPLETE}


@given(
    plan=plans(),
    seed=st.integers(0, 1 << 30),
    loss=st.sampled_from([0.0, 0.3]),
    damage=st.sampled_from([0.0, 0.2]),
    failure=st.sampled_from([0.0, 0.2]),
    turns=st.integers(1, 6),
)
@settings(max_examples=100)
def test_while_a_source_lives_all_complete_however_often_others_die_and_come_back(
    plan: TransferPlan, seed: int, loss: float, damage: float, failure: float, turns: int
) -> None:
    random = Random(seed)
    limits = SessionSettings(max_failures=1000)
    network = Network(plan, random, loss=loss, damage=damage, failure=failure, settings=limits)
    dead: list[int] = []
    for _ in range(turns):
        for _ in range(random.randrange(40 * plan.shape.nodes)):
            network.step()
        alive = [node for node in network.alive if node != plan.shape.sources[0]]
        if alive and (not dead or random.random() < 0.5):
            dead.append(random.choice(alive))
            network.kill(dead[-1])
        elif dead:
            back = dead.pop(random.randrange(len(dead)))
            network.begin(back, epoch=network.lives[back])
    network.run()
    assert network.states() == {SessionState.COMPLETE}


def test_silent_nodes_are_planned_around() -> None:
    plan = plan_of("chain", 6, 8)
    network = Network(plan, Random(1), stuck={2})
    network.run(5000)
    states = {node: session.state for node, session in network.sessions.items()}
    assert {states[node] for node in (0, 1, 3, 4, 5)} == {SessionState.COMPLETE}
    assert states[2] is SessionState.FAILED
    assert network.sessions[2].unreachable == tuple(range(8))


def reported(held: int, blocks: int = 4, epoch: int = 0, pending: int = 0) -> Bitfield:
    return Bitfield(blocks=blocks, epoch=epoch, held=held, pending=pending)


def session_of(
    order: list[tuple[int, int]],
    blocks: int = 4,
    peers: int = 4,
    *,
    known: dict[int, int] | None = None,
    in_slots: bool = False,
    **limits: float,
) -> Session:
    """`known`: what peers have reported."""
    session = Session(
        blocks=blocks,
        peers=range(1, peers + 1),
        order=order,
        in_slots=in_slots,
        settings=SessionSettings(**limits),  # type: ignore[arg-type]
    )
    session.start(0.0)
    for peer, held in (known or {}).items():
        session.on_bitfield(peer, reported(held, blocks), 0.0)
    return session


def pulls(actions: object) -> list[tuple[int, int]]:
    assert isinstance(actions, list)
    return [(action.source, action.block) for action in actions if isinstance(action, StartPull)]


ORDER = [(1, 0), (2, 1), (1, 2), (2, 3)]


def test_blocks_are_pulled_in_the_plans_order_as_their_sources_get_them() -> None:
    session = session_of(ORDER, window=2)
    assert pulls(session.on_bitfield(3, reported(0b1111), 0.0)) == []  # not the planned source
    assert pulls(session.on_bitfield(1, reported(0b0101), 0.0)) == [(1, 0), (1, 2)]
    assert session.bitfield == reported(0, pending=0b0101)
    assert pulls(session.on_bitfield(2, reported(0b0010), 0.0)) == []  # the window is full
    actions = session.on_arrived(1, 1.0)
    assert pulls(actions) == [(2, 1)] and PublishBitfield() in actions
    assert repr(session) == "Session(running: 1 of 4 blocks, 2 under way, epoch 0)"


def test_what_was_kept_is_not_pulled_again() -> None:
    session = Session(blocks=4, peers=[1, 2], order=ORDER, held=[0, 1, 2])
    assert session.start(0.0) == [RequestHave(2, 1)]  # the planned source of what is missing
    assert session.missing == (3,)
    assert pulls(session.on_bitfield(2, reported(0b1111), 0.0)) == [(2, 3)]
    session.on_arrived(1, 1.0)
    assert session.state is SessionState.COMPLETE and session.deadline_s is None
    done = Session(blocks=4, peers=[1], order=[], held=range(4))
    assert done.start(0.0) == [] and done.state is SessionState.COMPLETE


def test_after_a_loss_the_rarest_block_is_pulled_first_from_any_holder() -> None:
    session = session_of([(1, 0), (1, 1), (1, 2), (1, 3)], window=1, known={2: 0b1111, 3: 0b0111, 4: 0b0011})
    assert pulls(session.on_lost(1, 1.0)) == [(2, 3)]
    assert pulls(session.on_arrived(1, 2.0)) == [(3, 2)]
    assert pulls(session.on_arrived(2, 3.0)) == [(4, 0)]


def test_after_a_loss_nodes_turn_to_different_givers_and_begin_with_different_blocks() -> None:
    for shift, started in ((0, [(2, 0), (3, 1)]), (2, [(2, 2), (3, 3)])):
        order, peers = [(1, block) for block in range(4)], range(1, 4)
        settings = SessionSettings(window=2)
        session = Session(blocks=4, peers=peers, order=order, shift=shift, settings=settings)
        session.start(0.0)
        session.on_bitfield(2, reported(0b1111), 0.0)
        session.on_bitfield(3, reported(0b1111), 0.0)
        assert pulls(session.on_lost(1, 1.0)) == started


def test_after_a_loss_holders_under_the_same_leaf_come_first() -> None:
    order = [(1, block) for block in range(4)]
    settings = SessionSettings(window=3)
    session = Session(blocks=4, peers=[1, 2, 3], order=order, near=frozenset({3}), settings=settings)
    session.start(0.0)
    session.on_bitfield(2, reported(0b1111), 0.0)
    session.on_bitfield(3, reported(0b0011), 0.0)
    assert sorted(pulls(session.on_lost(1, 1.0))) == [(2, 2), (3, 0), (3, 1)]


def test_a_damaged_block_is_fetched_from_another_holder_and_then_given_up() -> None:
    session = session_of([(1, 0)], blocks=1, peers=2, max_tries=2, known={2: 1})
    assert pulls(session.on_bitfield(1, reported(1, blocks=1), 0.0)) == [(1, 0)]
    assert pulls(session.on_damaged(1, 1.0)) == [(2, 0)]
    again = pulls(session.on_damaged(2, 2.0)) + pulls(session.on_damaged(3, 2.0))
    assert sorted(again) == [(1, 0), (2, 0)]
    questions = [action for action in session.on_damaged(4, 2.0) if isinstance(action, RequestHave)]
    for question in (RequestHave(1, 1), *questions):  # the planned source was asked at first
        assert session.state is SessionState.RUNNING
        session.on_bitfield(question.peer, reported(1, blocks=1), 2.0, answers=question.number)
    assert session.state is SessionState.FAILED and session.unreachable == (0,)


def test_a_cast_fails_only_once_everybody_has_told_what_is_left() -> None:
    session = session_of([(1, 0)], blocks=1, peers=3)
    session.on_lost(1, 0.0)
    asked = [action for action in session.on_lost(2, 0.0) if isinstance(action, RequestHave)]
    assert [ask.peer for ask in asked] == [3]
    # Of before the loss; then one is coming there; then it did not come.
    session.on_bitfield(3, reported(0, blocks=1), 0.1, answers=asked[0].number - 1)
    assert session.state is SessionState.RUNNING
    session.on_bitfield(3, reported(0, blocks=1, pending=1), 0.1, answers=asked[0].number)
    assert session.state is SessionState.RUNNING
    session.on_bitfield(3, reported(0, blocks=1), 0.2)
    assert session.state is SessionState.FAILED and session.unreachable == (0,)


def test_a_source_that_hangs_is_left_where_another_node_holds_the_block() -> None:
    blocks = 12
    order = [(1 + block % 2, block) for block in range(blocks)]
    session = session_of(order, blocks=blocks, peers=4, window=1, ask_timeout_s=60.0)
    full = (1 << blocks) - 1
    actions = session.on_bitfield(1, reported(full, blocks), 0.0)
    session.on_bitfield(2, reported(full, blocks), 0.0)
    number, now_s = 1, 0.0
    for _ in range(6):
        assert pulls(actions)[0][0] in (1, 2)
        session.on_started(number, now_s)
        now_s += 1.0
        actions = session.on_arrived(number, now_s)
        number += 1
    assert pulls(actions) == [(1, 6)] and session.deadline_s == now_s + 8.0
    now_s += 1.0
    session.on_started(number, now_s)
    assert session.deadline_s == now_s + 8.0
    assert session.on_timer(now_s + 7.9) == []
    dropped = session.on_timer(now_s + 8.0)
    # Its block is left alone until the read has ended; the next is the plan's from the other source.
    assert dropped[0] == DropPull(number, "no block after 9 s", late=True) and pulls(dropped) == [(2, 7)]
    session.on_arrived(number + 1, now_s + 9.0)
    again = session.on_failed(number, now_s + 9.0)
    assert 1 not in {source for source, _ in pulls(again)}
    assert session.bitfield.pending.bit_count() == 1


def test_a_source_in_slots_may_send_nothing_for_long() -> None:
    session = session_of([(1, 0), (1, 1)], blocks=2, peers=2, in_slots=True, ask_timeout_s=60.0)
    for peer in (1, 2):
        session.on_bitfield(peer, reported(0b11, 2), 0.0)
    session.on_started(1, 0.0)
    session.on_arrived(1, 0.5)
    assert session.deadline_s == 0.5 + 4 * 4.0
    session.on_started(2, 1.0)
    assert session.deadline_s == 1.0 + 4.0


def test_a_returning_node_is_asked_again_and_stale_maps_are_not_believed() -> None:
    session = session_of([(1, 0)], blocks=1, peers=2, known={1: 0})
    session.on_lost(1, 1.0)
    assert pulls(session.on_bitfield(1, reported(1, blocks=1, epoch=0), 2.0)) == []
    assert pulls(session.on_bitfield(1, reported(1, blocks=1, epoch=1), 3.0)) == []
    assert pulls(session.on_failed(1, 3.0)) == [(1, 0)]  # the read that waited there has ended
    assert session.on_lost(1, 4.0, epoch=0) == []  # its life before
    assert session.on_bitfield(2, reported(3, blocks=2), 3.0) == []  # of another cast


def test_a_new_plan_keeps_what_is_here_and_an_old_one_is_ignored() -> None:
    session = session_of(ORDER, window=1, known={1: 0b1111, 3: 0b1111})
    session.on_arrived(1, 1.0)
    assert session.replan(0, [(3, 1)], 1.0) == []
    session.replan(1, [(3, 3), (3, 1), (3, 2), (3, 0)], 1.0)
    assert session.bitfield.epoch == 0  # of this life still
    assert pulls(session.on_arrived(2, 2.0)) == [(3, 3)]


@pytest.mark.parametrize("in_slots", [False, True])
def test_a_new_plan_waits_for_no_turn_of_the_old_one(in_slots: bool) -> None:
    session = session_of(ORDER, window=1, in_slots=in_slots, known={1: 0b1111, 3: 0b1111})
    actions = session.replan(1, [(3, 3), (3, 1), (3, 2), (3, 0)], 1.0)
    assert any(isinstance(action, DropPull) for action in actions) == in_slots
    assert pulls(actions) == ([(3, 3)] if in_slots else [])  # else the one of before goes on


def test_cancelling_drops_everything_and_nothing_follows() -> None:
    session = session_of(ORDER, known={1: 0b1111})
    assert [type(action) for action in session.cancel()] == [DropPull, DropPull]
    assert session.cancel() == [] and session.deadline_s is None
    assert session.on_arrived(1, 1.0) == [] and session.on_failed(2, 1.0) == []
    assert session.on_bitfield(2, reported(0b1111), 1.0) == [] and session.on_timer(99.0) == []
    assert session.state is SessionState.CANCELLED


@pytest.mark.parametrize("silent", [1, 2, 30])
def test_however_many_say_nothing_they_are_given_up_together(silent: int) -> None:
    session = session_of([(1, 0)], blocks=1, peers=1 + silent, ask_timeout_s=2.0, max_asks=4)
    session.on_bitfield(1, reported(1, blocks=1), 0.0, answers=1)
    session.on_lost(1, 1.0)
    session.on_failed(1, 1.0)
    while session.state is SessionState.RUNNING:
        assert session.deadline_s is not None
        now_s = session.deadline_s
        session.on_timer(now_s)
    assert session.state is SessionState.FAILED and now_s == 1.0 + 4 * 2.0
    assert set(session.lost_peers) == set(range(1, 2 + silent))


def test_a_pull_that_never_ends_is_dropped_but_not_pulled_twice_at_once() -> None:
    session = session_of([(1, 0)], blocks=1, peers=2, pull_timeout_s=5.0)
    session.on_bitfield(1, reported(1, blocks=1), 0.0, answers=1)
    session.on_bitfield(2, reported(1, blocks=1), 0.0, answers=2)
    actions = session.on_timer(5.0)
    assert [type(action) for action in actions if not isinstance(action, RequestHave)] == [DropPull]
    assert session.bitfield.pending == 0
    assert pulls(session.on_failed(1, 6.0)) == [(2, 0)]
    # A block that came although its pull was dropped counts.
    session.on_timer(11.0)
    session.on_arrived(2, 11.5)
    assert session.state is SessionState.COMPLETE


@given(st.integers(1, 300), st.integers(0, 1 << 40), st.data())
@settings(max_examples=50)
def test_have_maps_travel_and_bad_ones_are_refused(blocks: int, epoch: int, data: st.DataObject) -> None:
    bits = st.integers(0, (1 << blocks) - 1)
    have = Bitfield(blocks=blocks, epoch=epoch, held=data.draw(bits), pending=data.draw(bits))
    wire = have.encode()
    assert Bitfield.decode(wire) == have and len(wire) == 16 + 2 * -(-blocks // 8)
    assert to_bits(blocks_in(have.held)) == have.held
    for bad in (wire[:-1], wire + b"\0", b"\x02" + wire[1:], wire[:15], b""):
        with pytest.raises(ProtocolError):
            Bitfield.decode(bad)


@given(st.binary(max_size=80))
def test_no_bytes_make_a_have_map_fail_otherwise(data: bytes) -> None:
    try:
        assert 1 <= Bitfield.decode(data).blocks <= MAX_BLOCKS
    except ProtocolError:
        pass


def test_patience_is_shorter_in_a_quick_cast_and_grows_while_nothing_comes() -> None:
    order = [(1, block) for block in range(8)]
    session = session_of(order, blocks=8, peers=2, window=1, patience_s=2.0, known={1: 0b11111})
    assert session.deadline_s is not None
    for number in range(1, 6):
        session.on_arrived(number, 0.01 * number)
    session.on_bitfield(2, reported(0b11111111, blocks=8), 0.06)
    # The planned source may hang: after eight times the longest, or the minimum, a node with more is asked.
    assert session.deadline_s == pytest.approx(0.05 + 0.25)
    actions = session.on_timer(0.3)
    assert DropPull(6, "its source does not get it") in actions
    assert pulls(actions) == [(2, 6)]  # block 5 is left alone until the read that waited has ended
    assert pulls(session.on_arrived(7, 0.31)) == [(2, 7)]
    session.on_failed(6, 0.32)
    assert pulls(session.on_arrived(8, 0.33)) == [(2, 5)]


def test_who_slept_too_long_reads_what_came_before_it_drops_a_pull_as_late() -> None:
    """A machine that stands still for a moment had all nodes of a cast pull from its source at once."""
    order = [(1, block) for block in range(8)]
    session = session_of(order, blocks=8, peers=2, window=1)
    for peer in (1, 2):
        session.on_bitfield(peer, reported(0b11111111, blocks=8), 0.0)
    for number in range(1, 7):
        session.on_started(number, 0.01 * (number - 1))
        session.on_arrived(number, 0.01 * number)
    session.on_started(7, 0.06)
    assert session.deadline_s == pytest.approx(0.31)
    assert session.on_timer(0.5) == []
    deadline_s = session.deadline_s
    assert deadline_s is not None and deadline_s == pytest.approx(0.31 + 2 * (0.5 - 0.31))
    assert DropPull(7, "no block after 0.25 s", late=True) in session.on_timer(deadline_s)


def test_who_has_nothing_to_pull_asks_less_often_as_time_goes_by() -> None:
    order = [(1, block) for block in range(8)]
    limits = {"window": 1, "patience_s": 1.0, "ask_timeout_s": 60.0}
    session = session_of(order, 8, 1, **limits)
    session.on_bitfield(1, reported(0b11111, blocks=8, pending=0b11100000), 0.0)
    for number in range(1, 6):
        session.on_arrived(number, 0.01 * number)
    on_timer = [0.05]
    for _ in range(5):
        assert session.deadline_s is not None
        on_timer.append(session.deadline_s)
        for action in session.on_timer(on_timer[-1]):
            assert isinstance(action, RequestHave | DropPull)
            session.on_bitfield(
                1, reported(0b11111, blocks=8, pending=0b11100000), on_timer[-1], action.number
            )
    pauses = [later - before for before, later in pairwise(on_timer)]
    assert pauses == pytest.approx([0.25, 0.5, 1.0, 1.0, 1.0])


def test_a_peer_that_says_for_ever_that_a_block_is_coming_is_not_waited_for_for_ever() -> None:
    session = session_of([(1, 0)], 1, 2, pull_timeout_s=10.0, known={1: 0b1})
    session.on_lost(1, 0.0)
    session.on_failed(1, 0.0)
    epochs = iter(range(1000))
    now_s = 0.0
    session.on_bitfield(2, reported(0, blocks=1, pending=1), now_s, 1)
    while session.state is SessionState.RUNNING and now_s < 1000.0:
        assert session.deadline_s is not None
        now_s = session.deadline_s
        for action in session.on_timer(now_s):
            if isinstance(action, RequestHave):
                lie = Bitfield(blocks=1, epoch=next(epochs), held=0, pending=1)
                session.on_bitfield(action.peer, lie, now_s, action.number)
    assert session.state is SessionState.FAILED and 20.0 <= now_s < 30.0


def test_after_quick_blocks_a_source_may_take_as_long_as_links_need() -> None:
    """After a rest shapers let blocks through at once."""
    assert SessionSettings().for_links(0.2).min_silence_s == pytest.approx(1.6)
    assert SessionSettings().for_links(0.002) == SessionSettings().for_links(0.0) == SessionSettings()
