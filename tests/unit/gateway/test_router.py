"""Routing and admission: least loaded within limits, by arrival within a tenant."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.replicas import PipelineReplica, pipeline_replica, slots_key_of
from gateway.cluster.state_cache import VersionKey
from gateway.core.contract import DispatchError
from gateway.dispatch.admission import Admission, AdmissionLimits, QueuedRequest
from gateway.dispatch.router import CallTokens, ReplicaSlots
from registry.records.instance import InstanceRecord
from registry.records.live import LiveMode, LivePipeline, LiveStage
from tests.fixtures.control import make_call, make_instance, make_version

KEY = VersionKey("f", 1)


def make_queued(at: float = 0.0, *, function: str = "f", tenant: str = "t") -> QueuedRequest:
    return QueuedRequest(
        make_call(make_version(function), tenant=tenant), VersionKey(function, 1), at, 0, hot=False
    )


def pipeline_of(id_: str, *instances: str, rate: float, slots: int) -> PipelineReplica:
    """Of instances with four layers each, every one on a node of its own; the last one is the head."""
    stages = tuple(
        LiveStage(node=f"n-{name}", instance_id=name, first=4 * at, last=4 * at + 4)
        for at, name in enumerate(instances)
    )
    head = len(stages) - 1
    return pipeline_replica(
        LivePipeline(pipeline_id=id_, epoch=0, stages=stages, head=head, rate=rate, slots=slots)
    )


def test_the_least_loaded_by_share_takes_the_call() -> None:
    slots, rng = ReplicaSlots(), random.Random(1)
    big, small = make_instance("big", "a", max_concurrency=8), make_instance("small", "b", max_concurrency=2)
    taken: Counter[str] = Counter()
    while (choice := slots.choose([big, small], rng, 0.0).instance) is not None:
        slots.acquire(choice.instance_id)
        taken[choice.instance_id] += 1
        if sum(taken.values()) == 5:
            assert taken == {"big": 4, "small": 1}
    assert taken == {"big": 8, "small": 2}
    slots.release("small")
    assert slots.choose([big, small], rng, 0.0).instance is small


def test_ties_are_broken_by_the_given_chance() -> None:
    slots = ReplicaSlots()
    both = [make_instance("a", "a"), make_instance("b", "b")]
    rng = random.Random(7)
    seen = [slots.choose(both, rng, 0.0).instance for _ in range(32)]
    assert all(instance in seen for instance in both)


def test_a_full_instance_is_left_alone_for_a_while() -> None:
    slots, rng = ReplicaSlots(), random.Random(1)
    only = make_instance("a", "a")
    slots.back_off_until("a", 5.0)
    choice = slots.choose([only], rng, 4.0)
    assert (choice.instance, choice.next_at) == (None, 5.0)
    assert slots.choose([only], rng, 5.0).instance is only


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 40))
def test_no_instance_is_above_its_limit_and_loads_differ_by_at_most_a_slot(
    limits: list[int], calls: int
) -> None:
    slots, rng = ReplicaSlots(), random.Random(3)
    instances = [make_instance(f"i{n}", f"n{n}", max_concurrency=limit) for n, limit in enumerate(limits)]
    for _ in range(calls):
        chosen = slots.choose(instances, rng, 0.0).instance
        if chosen is None:
            assert sum(slots.in_flight.values()) == sum(limits)
            break
        slots.acquire(chosen.instance_id)
    for instance in instances:
        assert slots.in_flight[instance.instance_id] <= instance.max_concurrency


def test_an_owed_call_finds_room_on_a_full_instance_but_not_without_end() -> None:
    slots, rng = ReplicaSlots(), random.Random(1)
    only = make_instance("a", "a", max_concurrency=4)
    for _ in range(4):
        slots.acquire("a")
    assert slots.choose([only], rng, 0.0).instance is None
    for _ in range(2):
        assert slots.choose([only], rng, 0.0, over_commit=True).instance is only
        slots.acquire("a")
    assert slots.choose([only], rng, 0.0, over_commit=True).instance is None
    other = make_instance("b", "b", max_concurrency=4)
    slots.acquire("b")
    assert slots.choose([only, other], rng, 0.0, over_commit=True).instance is other


def test_a_queue_goes_by_arrival_within_a_tenant_and_a_returning_call_keeps_its_place() -> None:
    admission = Admission(AdmissionLimits())
    queued = [make_queued(float(at)) for at in range(3)]
    for one in queued:
        admission.enqueue(one)
    instance = make_instance("i", "a")
    admission.assign(queued[0], instance)
    assert (admission.held, admission.calls) == (2, 3)
    admission.requeue(queued[0])
    assert list(admission.queue(KEY).to_prefill) == queued
    for one in queued:
        admission.leave(one)
        admission.leave(one)
    assert admission.calls == 0 and list(admission.queues()) == []


def test_limits_hold_for_new_calls_only() -> None:
    admission = Admission(AdmissionLimits(held_per_function=1, held=2))
    first, other = make_queued(), make_queued(function="g")
    admission.enqueue(first)
    with pytest.raises(DispatchError, match="queued for f"):
        admission.enqueue(make_queued())
    admission.enqueue(other)
    with pytest.raises(DispatchError):
        admission.enqueue(make_queued(function="h"))
    assert len(list(admission.queues())) == 2
    admission.assign(first, make_instance("i", "a"))
    admission.enqueue(make_queued())
    admission.requeue(first)
    assert admission.held == 3
    admission.draining = True
    with pytest.raises(DispatchError) as caught:
        admission.check_open()
    assert (caught.value.code, caught.value.status, caught.value.retry_after_s) == ("draining", 503, 2)


def test_a_pipeline_gets_what_keeps_it_busy_until_these_begin() -> None:
    slots, rng = ReplicaSlots(), random.Random(1)
    pipeline = pipeline_of("p", "i0", "i1", rate=1.8, slots=6)
    for _ in range(4):
        assert slots.choose([pipeline], rng, 0.0).instance is pipeline
        slots.acquire(pipeline.instance_id)
    assert slots.choose([pipeline], rng, 0.0).instance is None
    slots.on_first_token(pipeline.instance_id)
    assert slots.room(pipeline) == 1
    slots.release(pipeline.instance_id, has_token=True)
    assert slots.room(pipeline) == 1  # three wait there still
    slots.release(pipeline.instance_id)
    assert slots.room(pipeline) == 2
    for _ in range(2):
        slots.acquire(pipeline.instance_id)
        slots.on_first_token(pipeline.instance_id)
    assert slots.room(pipeline) == 2  # four of six places are taken


def test_an_instance_beside_a_pipeline_gets_what_keeps_it_busy() -> None:
    slots, rng, instance = ReplicaSlots(), random.Random(1), make_instance("i", "n9", max_concurrency=8)
    pipeline = pipeline_of("p", "s0", "s1", rate=1.8, slots=64)
    chosen = []
    while (server := slots.choose([pipeline, instance], rng, 0.0).instance) is not None:
        slots.acquire(slots_key_of(server), 600)
        chosen.append(server.instance_id)
    assert (chosen.count("p.0"), chosen.count("i")) == (4, 2)
    slots.on_first_token("i")
    assert slots.choose([pipeline, instance], rng, 0.0).instance is instance
    for _ in range(5):  # with the pipeline gone it fills its slots
        slots.acquire("i", 600)
    assert slots.choose([pipeline, instance], rng, 0.0).instance is None
    assert slots.choose([instance], rng, 0.0).instance is instance


def test_a_node_that_loads_alone_takes_all_that_it_will_serve() -> None:
    slots = ReplicaSlots()
    lone = pipeline_of("p", "i", rate=1.0, slots=6)
    assert slots.room(lone) == 6
    pipeline = pipeline_of("q", "m0", "m1", rate=0.1, slots=64)
    rng, chosen = random.Random(1), []
    while (server := slots.choose([pipeline, lone], rng, 0.0).instance) is not None:
        slots.acquire(slots_key_of(server), 600)
        chosen.append(server.instance_id)
    assert (chosen.count("q.0"), chosen.count("p.0")) == (4, 6)  # beside a pipeline, too


def test_a_pair_takes_as_many_as_can_wait_there_for_its_target() -> None:
    slots = ReplicaSlots()
    stages = tuple(
        LiveStage(node=f"n{place}", instance_id=f"i{place}", first=place, last=place + 1)
        for place in range(2)
    )
    pair = LivePipeline(
        pipeline_id="p", epoch=0, stages=stages, head=1, rate=2.0, slots=16, way=LiveMode.ZIGZAG
    )
    assert slots.room(pipeline_replica(pair)) == 16


@pytest.mark.parametrize(("instances", "calls"), [(("i",), 2), (("target", "source"), 4)])
def test_paced_calls_wait_at_the_gateway_rather_than_on_a_pair(
    instances: tuple[str, ...], calls: int
) -> None:
    """From there they can go to another instance that becomes ready; short prompts may still fill it."""
    pair = pipeline_replica(
        replace(pipeline_of("p", *instances, rate=1.0, slots=64).pipeline, way=LiveMode.ZIGZAG)
    )
    rng = random.Random(1)
    for tokens, expected in ((CallTokens(prompt=2000, kv=3000), calls), (CallTokens(prompt=16, kv=50), 64)):
        slots, count = ReplicaSlots(), 0
        while slots.choose([pair], rng, 0.0, paced=tokens).instance is not None:
            slots.acquire(slots_key_of(pair), 600, tokens)
            count += 1
        assert count == expected


def test_calls_of_a_prefix_go_to_one_instance() -> None:
    slots, rng = ReplicaSlots(), random.Random(3)
    four = [make_instance(name, name, max_concurrency=8) for name in "abcd"]

    def place(prefix: int, instances: Sequence[InstanceRecord]) -> str:
        choices = [slots.choose(instances, rng, 0.0, prefix=prefix).instance for _ in range(5)]
        (only,) = {choice.instance_id for choice in choices if choice is not None}
        return only

    places = {prefix: place(prefix, four) for prefix in range(1, 200)}
    taken = Counter(places.values())
    assert len(taken) == 4 and min(taken.values()) > 25
    without_c = [one for one in four if one.instance_id != "c"]
    moved = [prefix for prefix in places if place(prefix, without_c) != places[prefix]]
    assert len(moved) == taken["c"]  # the others stay


@given(st.integers(2, 6), st.integers(1, 60), st.integers(0, 1000))
def test_a_popular_prefix_does_not_fill_one_instance(count: int, calls: int, seed: int) -> None:
    slots, rng = ReplicaSlots(), random.Random(seed)
    instances = [make_instance(str(number), str(number), max_concurrency=64) for number in range(count)]
    for _ in range(calls):
        chosen = slots.choose(instances, rng, 0.0, prefix=7).instance
        assert chosen is not None
        slots.acquire(chosen.instance_id)
    assert max(slots.in_flight.values()) <= 1.25 * calls / count + 2
