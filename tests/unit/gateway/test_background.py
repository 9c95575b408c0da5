"""Calls in the background: behind all others, and on slots that leave some free."""

import random

import msgspec
import pytest

from gateway.cluster.state_cache import VersionKey
from gateway.core.contract import DispatchError
from gateway.dispatch.admission import Admission, AdmissionLimits, QueuedRequest
from gateway.dispatch.router import ReplicaSlots
from registry.records.function import Scaling
from tests.fixtures.control import ask, make_call, make_instance, make_version, open_cluster

KEY = VersionKey("f", 1)


def make_queued(*, background: bool, tenant: str = "t") -> QueuedRequest:
    call = msgspec.structs.replace(make_call(make_version("f"), tenant=tenant), background=background)
    return QueuedRequest(call, KEY, 0.0, 0, hot=False)


def test_calls_in_the_background_leave_slots_free() -> None:
    slots, rng = ReplicaSlots(), random.Random(1)
    only = make_instance("a", "a", max_concurrency=8)
    taken = 0
    while slots.choose([only], rng, 0.0, background=True).instance is only:
        slots.acquire("a")
        taken += 1
    assert taken == 6
    assert slots.choose([only], rng, 0.0).instance is only
    single = make_instance("b", "b", max_concurrency=1)
    assert ReplicaSlots().choose([single], rng, 0.0, background=True).instance is single


def test_a_full_queue_rejects_calls_in_the_background_first() -> None:
    admission = Admission(AdmissionLimits(held_per_function=4))
    front = [make_queued(background=False) for _ in range(2)]
    behind = [make_queued(background=True) for _ in range(2)]
    for one in (*front, *behind):
        admission.enqueue(one)
    admission.enqueue(make_queued(background=False, tenant="other"))
    assert [one.error is None for one in (*front, *behind)] == [True, True, True, False]
    with pytest.raises(DispatchError):
        admission.enqueue(make_queued(background=True))
    queue = admission.queue(KEY)
    assert (queue.waiting, queue.in_flight) == (4, 0)
    admission.assign(behind[0], make_instance("i", "a"))
    admission.requeue(behind[0])
    assert list(queue.background) == [behind[0]]
    for queued in queue.calls():
        admission.leave(queued)
    assert admission.calls == 0 and list(admission.queues()) == []


async def test_calls_of_clients_overtake_those_in_the_background() -> None:
    """All slots that the background may have are taken, and more wait: a client's call starts at once."""
    async with open_cluster(1) as cluster:
        node = cluster.nodes["n0"]
        version = await cluster.deploy(Scaling(max_instances=1))
        await ask(cluster.control, make_call(version))
        node.token.close()
        dispatcher = cluster.control.dispatcher
        behind = [
            dispatcher.enter(
                msgspec.structs.replace(make_call(version, request_id=f"b{number}"), background=True)
            )
            for number in range(20)
        ]
        placed = [one for one in behind if one.instance is not None]
        assert 0 < len(placed) < 8  # of the eight slots of an instance
        front = [dispatcher.enter(make_call(version, request_id=f"c{number}")) for number in range(6)]
        assert all(one.instance is not None for one in front)  # some beyond the limit
        late = dispatcher.enter(
            msgspec.structs.replace(make_call(version, request_id="late"), background=True)
        )
        assert late.instance is None
        for one in (*placed, *front):
            dispatcher.leave(one)
        waited = [one for one in behind if one not in placed]
        assert sum(one.instance is not None for one in waited) == len(placed)
        for one in (*waited, late):
            dispatcher.leave(one)
        node.token.open()
        assert cluster.control.stats().held == cluster.control.stats().in_flight == 0
