"""Starts and victims chosen with the index: the same as by looking at every node, for less work."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.cluster.backoff import BackoffTable
from gateway.cluster.node_space import arena_room
from gateway.cluster.state_cache import FINAL_STATES, ClusterStateCache, VersionKey
from gateway.planning.arena_space import (
    ArenaSpace,
    FreeNodes,
    SpaceRequest,
    choose_victims,
    instance_bytes,
    is_leaving,
)
from gateway.planning.placement import can_run, choose_starts, extra_bytes, image_need, start_candidates
from gateway.planning.plan import PendingStart
from gateway.planning.policy import FunctionLoad
from registry.records.change import FunctionChanged, InstanceChanged, NodeUp
from registry.records.function import Function, FunctionTask, FunctionVersion, Scaling
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.node import NodeRecord, Tier
from tests.fixtures.call_counts import calls_made
from tests.fixtures.control import MIB, make_holding, make_instance, make_node, make_version

NAMES = ("f", "g", "h")
ARENA = 64
FEW, MANY = 250, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A cluster, and what a planner has requested from it."""

    cache: ClusterStateCache
    versions: Mapping[str, FunctionVersion]
    pending: tuple[PendingStart, ...]
    backoff: BackoffTable
    stopping: frozenset[str]
    in_flight: Mapping[str, int]
    loads: Mapping[VersionKey, FunctionLoad]

    def space(self) -> ArenaSpace:
        return ArenaSpace(self.cache, self.pending, self.backoff)


def make_scene(rng: random.Random, nodes: int) -> Scene:
    """Return a random cluster, full or not: some nodes are small, emulated or bar handlers."""
    cache, backoff, full = ClusterStateCache(), BackoffTable(), rng.random() < 0.5
    versions = {
        name: make_version(name, image=None if name == "h" else name, nbytes=rng.choice([8, 20, 40]) * MIB)
        for name in NAMES
    }
    if rng.random() < 0.5:
        versions["h"] = make_version("h", image=None, task=FunctionTask.HANDLER)
    for name, version in versions.items():
        head = Function(name=name, current=1, versions=(1,))
        cache.apply(FunctionChanged(function=head, version=version), 0.0)
    for number in range(nodes):
        record = make_record(number, versions, full, rng)
        cache.apply(NodeUp(record=record, ttl_s=60.0), 0.0)
        cache.channel_up(record.id, 1 if rng.random() < 0.9 else 0)
    states = [state for state in InstanceState if state not in FINAL_STATES]
    states += [InstanceState.READY] * (30 if full else 1)
    for number in range(rng.randint(0, 2 * nodes)):
        state = rng.choice(states)
        node, name = f"n{rng.randrange(nodes)}", rng.choice("fggg" if full else NAMES)
        record_ = make_instance(f"i{number}", node, name=name, state=state, since=float(rng.randint(0, 3)))
        cache.apply(InstanceChanged(record=record_), 0.0)
    ids = [one.instance_id for one in cache.instances()]
    if rng.random() < 0.3:
        backoff.no_space(VersionKey("f", 1), "n0", rng.choice([1, 9]) * MIB, "too small", 0.0)
    return Scene(
        cache=cache,
        versions=versions,
        pending=tuple(
            PendingStart(key=VersionKey(name, 1), node=f"n{rng.randrange(nodes)}", image=versions[name].image)
            for name in rng.choices(NAMES, k=rng.randint(0, 3))
        ),
        backoff=backoff,
        stopping=frozenset(id_ for id_ in ids if rng.random() < (0.02 if full else 0.1)),
        in_flight={id_: int(rng.random() < 0.2) for id_ in ids},
        loads={
            VersionKey(name, 1): FunctionLoad(
                in_flight=rng.choice([0, 0, 8]),
                held=0,
                ready=len(cache.ready(VersionKey(name, 1))),
                starting=0,
                nodes=nodes,
                scaling=Scaling(min_instances=rng.randint(0, 1)),
            )
            for name in NAMES
        },
    )


def make_record(
    number: int, versions: Mapping[str, FunctionVersion], full: bool, rng: random.Random
) -> NodeRecord:
    shares = {"f": 0.05, "g": 0.9} if full else {"f": 0.3, "g": 0.3}
    held = [name for name, share in shares.items() if rng.random() < share]
    holdings = tuple(
        make_holding(
            name,
            *rng.sample([Tier.GPU, Tier.HOST, Tier.DISK], rng.randint(1, 3)),
            nbytes=versions[name].image_bytes,
        )
        for name in held
    )
    return make_node(
        f"n{number}",
        host=f"h{rng.randrange(1 + number)}",
        holdings=holdings,
        gpu_bytes=rng.choice([32, ARENA, ARENA] if full else [0, 32, ARENA, ARENA]) * MIB,
        gpu_free_bytes=rng.choice([0, 9] if full else [9, 24, ARENA, ARENA]) * MIB,
        host_free_bytes=rng.choice([0, 256]) * MIB,
        allows_handlers=rng.random() < 0.7,
        device="emulated:H100" if rng.random() < (0.0 if full else 0.1) else "cpu",
    )


def used_images(cache: ClusterStateCache) -> dict[str, set[str]]:
    used: dict[str, set[str]] = {}
    for one in cache.instances():
        version = cache.version(VersionKey(one.function, one.version))
        if version is not None and version.image is not None:
            used.setdefault(one.node, set()).add(version.image)
    return used


def starts_by_looking_at_all(scene: Scene, request: SpaceRequest, reserved: Mapping[str, int]) -> list[str]:
    nodes = [node for node in scene.cache.usable_nodes() if node.id in request.free]
    candidates = start_candidates(
        request.version,
        nodes,
        used_images=used_images(scene.cache),
        reserved_bytes=reserved,
        instances=Counter(one.node for one in scene.cache.instances()),
        loading_hosts=request.loading_hosts,
        min_bytes=request.min_bytes,
        preferred_bytes=extra_bytes(request.version, request.min_bytes),
    )
    return [site.id for site in choose_starts(request.count, candidates)]


def victims_by_looking_at_all(scene: Scene, request: SpaceRequest, reserved: Mapping[str, int]) -> list[str]:
    """Return the instances that `choose_victims` promises, by looking at each node."""
    cache, version = scene.cache, request.version
    spare = {k: one.ready - max(one.needed, one.scaling.min_instances) for k, one in scene.loads.items()}
    best: list[InstanceRecord] | None = None
    for node in cache.usable_nodes():
        if node.id not in request.free or not can_run(version, node):
            continue
        here = [i for i in cache.instances() if i.node == node.id]
        images = {i.instance_id: instance_bytes(cache, i) for i in here}
        models = sum(1 for nbytes in images.values() if nbytes)
        held = sum(h.bytes for h in node.holdings if Tier.GPU in h.tiers)
        rest = max(0, node.gpu_bytes - node.gpu_free_bytes - held)
        freed = {id_: nbytes + rest // models if nbytes else 0 for id_, nbytes in images.items()}
        lack = image_need(version, node) + request.min_bytes + reserved.get(node.id, 0)
        lack -= arena_room(node, version.image, used_images(cache).get(node.id, ()))
        lack -= sum(freed[i.instance_id] for i in here if is_leaving(i, scene.stopping))
        if lack <= 0:
            return []
        left, victims = Counter(spare), []
        for one in sorted(here, key=lambda i: i.since):
            other = VersionKey(one.function, one.version)
            idle = one in cache.ready(other) and not scene.in_flight.get(one.instance_id)
            if lack > 0 and idle and other != VersionKey(version.function, 1) and left[other] > 0:
                left[other] -= 1
                lack -= freed[one.instance_id]
                victims.append(one)
        if lack <= 0 and (best is None or len(victims) < len(best)):
            best = victims
    return [one.instance_id for one in best or []]


def make_request(scene: Scene, nodes: int, rng: random.Random) -> SpaceRequest:
    name = rng.choice(NAMES)
    some = [f"n{number}" for number in range(nodes) if rng.random() < 0.2]
    return SpaceRequest(
        version=scene.versions[name],
        count=rng.randint(0, nodes + 1),
        free=FreeNodes(excluded=some, only=some if rng.random() < 0.1 else None),
        min_bytes=scene.backoff.min_bytes(VersionKey(name, 1)),
        loading_hosts={f"h{rng.randrange(nodes)}"} if rng.random() < 0.3 and name != "h" else (),
    )


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 12), st.integers(0, 2**32))
def test_starts_and_victims_are_those_of_looking_at_all_nodes(nodes: int, seed: int) -> None:
    rng = random.Random(seed)
    scene = make_scene(rng, nodes)
    space = scene.space()
    for _ in range(3):  # of one step: each start reserves space for the next ones
        request, reserved = make_request(scene, nodes, rng), dict(space.reserved)
        chosen = [site.id for site in choose_starts(request.count, space.candidates(request))]
        assert chosen == starts_by_looking_at_all(scene, request, reserved)
        gone = choose_victims(request, space, scene.loads, in_flight=scene.in_flight, stopping=scene.stopping)
        victims = [] if gone is None else [one.instance_id for one in gone.victims]
        assert victims == victims_by_looking_at_all(scene, request, reserved)
        for id_ in chosen:
            space.reserve(request.version, scene.cache.index.usable[id_])


def test_starts_that_are_coming_reserve_what_their_nodes_will_take() -> None:
    """A node gives half of the rest to the KV cache: a second start of that size does not fit beside it."""
    scene = large(2)
    space, version = scene.space(), scene.versions["f"]
    node = scene.cache.index.usable["n0"]
    assert space.room(node, version.image) == ARENA * MIB
    space.reserve(version, node)
    assert space.room(node, version.image) == (ARENA - 40) * MIB // 2
    space.reserve(make_version("h", image=None), node)  # a handler takes none
    assert space.room(node, version.image) == (ARENA - 40) * MIB // 2
    request = SpaceRequest(version=scene.versions["g"], count=2, free=FreeNodes(excluded=()))
    assert [site.id for site in choose_starts(2, space.candidates(request))] == ["n1"]
    pending = PendingStart(key=VersionKey("f", 1), node="n1", image=version.image)
    asked = ArenaSpace(scene.cache, [pending], scene.backoff)
    assert asked.room(scene.cache.index.usable["n1"], version.image) == (ARENA - 40) * MIB // 2


def large(nodes: int, *, full: bool = False) -> Scene:
    """Return a cluster of equal nodes, each on a host of its own; on a full one each runs an instance."""
    cache = ClusterStateCache()
    versions = {name: make_version(name, image=name, nbytes=40 * MIB) for name in NAMES}
    for name, version in versions.items():
        head = Function(name=name, current=1, versions=(1,))
        cache.apply(FunctionChanged(function=head, version=version), 0.0)
    for number in range(nodes):
        free = 24 if full else ARENA
        record = make_node(f"n{number}", gpu_bytes=ARENA * MIB, gpu_free_bytes=free * MIB)
        cache.apply(NodeUp(record=record, ttl_s=60.0), 0.0)
        cache.channel_up(record.id, 1)
        if full:
            record_ = make_instance(f"i{number}", record.id, name="g")
            cache.apply(InstanceChanged(record=record_), 0.0)
    assert len(cache.index.emptiest()) == nodes
    load = FunctionLoad(in_flight=0, held=0, ready=0, starting=0, nodes=nodes, scaling=Scaling())
    return Scene(
        cache=cache,
        versions=versions,
        pending=(),
        backoff=BackoffTable(),
        stopping=frozenset(),
        in_flight={},
        loads={VersionKey(name, 1): load for name in NAMES},
    )


def start_on(nodes: int) -> Callable[[], object]:
    scene = large(nodes)
    request = SpaceRequest(version=scene.versions["f"], count=3, free=FreeNodes(excluded=()))
    return lambda: choose_starts(3, scene.space().candidates(request))


def looked_at_in_vain(nodes: int) -> Callable[[], object]:
    scene = large(nodes, full=True)
    request = SpaceRequest(version=scene.versions["f"], count=3, free=FreeNodes(excluded=()))

    def work() -> None:
        space = scene.space()
        assert space.candidates(request) == []
        assert choose_victims(request, space, scene.loads, in_flight={}, stopping=()) is None

    return work


def test_a_start_costs_the_same_among_four_times_the_nodes() -> None:
    start_on(FEW)()  # the first one fills the cache of abstract base classes
    assert calls_made(start_on(MANY)) == calls_made(start_on(FEW))


@pytest.mark.parametrize("nodes", [FEW, MANY])
def test_a_full_cluster_costs_a_few_steps_a_node(nodes: int) -> None:
    assert calls_made(looked_at_in_vain(nodes)) < 8 * nodes
