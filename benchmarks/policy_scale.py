"""Time a planning decision at a size that no test cluster has: by default 200 functions on 1,000 nodes.

The state cache, the reports of nodes and the demand of gateways are real records in memory; nothing is
started. Records: `policy` is the scaling policy alone, for all functions; `decision` is all that decides the
numbers of instances (loads of all functions, capacities, policy); `plan` also chooses the nodes of starts and
the instances to stop, `controller` is one step of the control loop: plan, host copies and casts. `quiet` is a
step that starts nothing, `burst` one in which a tenth of the functions need more instances at once. Each
repetition has its own planner, so nothing is left over from another.

example:
  python -m benchmarks.policy_scale --functions 200 --nodes 1000 --json policy-scale.json
"""

import hashlib
import random
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

from benchmarks.harness.arguments import at_least, benchmark_parser
from benchmarks.harness.records import Record, all_but, describe_run, recording, timed
from gateway.cluster.state_cache import ClusterStateCache, VersionKey
from gateway.planning.actions import PrefetchAction, StartAction
from gateway.planning.cast_planner import CastPlanner
from gateway.planning.load_target import PolicyBySetting
from gateway.planning.loads import function_loads
from gateway.planning.plan import Plan, VersionDemand
from gateway.planning.planner import ScalingPlanner
from gateway.planning.policy import FunctionLoad, PolicyState
from gateway.planning.replicator import Replicator
from gateway.planning.work import TokenLoad
from registry.messages.node import InstanceLoad
from registry.records.change import FunctionChanged, InstanceChanged, NodeUp
from registry.records.function import Function, FunctionTask, FunctionVersion, Scaling, ScalingMode
from registry.records.instance import InstanceRecord, InstanceState, StartKind
from registry.records.node import CachedImage, NodeRecord, NodeState, Tier

GIB = 1 << 30
IMAGE_BYTES = 13 * GIB
COPIES = 1  # of each image that are kept in host memory
PROMPT, OUTPUT = 1000, 200
LIMIT_S = 0.05
NOW_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A cluster as the controller sees it: its state, the demand, and the loads of instances by node."""

    cache: ClusterStateCache
    demand: dict[VersionKey, VersionDemand]
    loads: dict[str, tuple[InstanceLoad, ...]]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_world(functions: int, nodes: int, busy_share: float, rng: random.Random) -> World:
    """Return a cluster in which half of the nodes run an instance; that share of functions has a burst."""
    cache = ClusterStateCache()
    versions = [make_version(f"f{number}") for number in range(functions)]
    holdings: dict[int, list[CachedImage]] = {}
    placed = [(versions[number % functions], number) for number in range(nodes // 2)]
    for version, number in placed:
        holdings.setdefault(number, []).append(holding(version, Tier.GPU, Tier.HOST))
    for version in versions:
        for number in rng.sample(range(nodes), COPIES):
            if all(held.image != version.image for held in holdings.get(number, ())):
                holdings.setdefault(number, []).append(holding(version, Tier.HOST))
    for number in range(nodes):
        record = make_node(number, tuple(holdings.get(number, ())))
        cache.apply(NodeUp(record=record, ttl_s=1e6), 0.0)
        cache.channel_up(record.id, record.epoch)
    scaling = Scaling(policy=ScalingMode.LOAD)
    for version in versions:
        head = Function(name=version.function, current=1, versions=(1,), scaling=scaling)
        cache.apply(FunctionChanged(function=head, version=version), 0.0)
    instances = dict[VersionKey, int]()
    loads = dict[str, tuple[InstanceLoad, ...]]()
    for version, number in placed:
        record_, load = make_instance(version, number)
        cache.apply(InstanceChanged(record=record_), 0.0)
        loads[record_.node] = (load,)
        key = VersionKey(version.function, 1)
        instances[key] = instances.get(key, 0) + 1
    busy = rng.sample(versions, round(functions * busy_share))
    demand = {}
    for version in versions:
        key = VersionKey(version.function, 1)
        held = rng.randint(60, 120) if version in busy else 0
        demand[key] = make_demand(held, 8 * instances.get(key, 0))
    return World(cache=cache, demand=demand, loads=loads)


def make_version(name: str) -> FunctionVersion:
    return FunctionVersion(
        function=name,
        version=1,
        task=FunctionTask.GENERATE,
        architecture="llama",
        image=digest(name),
        manifest=digest(f"manifest of {name}"),
        image_bytes=IMAGE_BYTES,
        blocks=64,
        dtype="bfloat16",
        context_length=4096,
        assets={},
        created_at=0.0,
    )


def make_node(number: int, holdings: tuple[CachedImage, ...]) -> NodeRecord:
    on_gpu = sum(one.bytes for one in holdings if Tier.GPU in one.tiers)
    on_host = sum(one.bytes for one in holdings if Tier.HOST in one.tiers)
    return NodeRecord(
        id=f"n{number}",
        host=f"h{number}",
        pid=1,
        epoch=1,
        state=NodeState.READY,
        device="cuda:0",
        gpu_type="H100",
        gpu_count=1,
        channel=f"tcp://n{number}:1",
        cast=f"tcp://n{number}:2",
        gpu_bytes=80 * GIB,
        gpu_free_bytes=80 * GIB - 2 * on_gpu,
        host_bytes=256 * GIB,
        host_free_bytes=256 * GIB - on_host,
        reads_store=True,
        allows_handlers=False,
        link_rate_bytes_s=None,
        started_at=0.0,
        holdings=holdings,
    )


def holding(version: FunctionVersion, *tiers: Tier) -> CachedImage:
    assert version.image is not None
    pinned = Tier.GPU not in tiers
    return CachedImage(image=version.image, tiers=tiers, bytes=IMAGE_BYTES, last_used_at=0.0, pinned=pinned)


def make_instance(version: FunctionVersion, number: int) -> tuple[InstanceRecord, InstanceLoad]:
    id_ = f"{version.function}-1-{number}"
    record = InstanceRecord(
        instance_id=id_,
        function=version.function,
        version=1,
        node=f"n{number}",
        state=InstanceState.READY,
        start_kind=StartKind.COLD,
        since=0.0,
        phases_ms={"fetch": 500.0},
        max_concurrency=64,
        kv_tokens=30_000,
    )
    load = InstanceLoad(
        instance_id=id_,
        function=version.function,
        version=1,
        queued_prompt_tokens=500,
        running=8,
        waiting=1,
        decode_tokens_s=400.0,
        prefill_tokens_s=20_000.0,
        decode_steps=((1, 0.012), (2, 0.012), (4, 0.013), (8, 0.015)),
        kv_used_tokens=9000,
        kv_tokens=30_000,
    )
    return record, load


def make_demand(held: int, running: int) -> VersionDemand:
    tokens = TokenLoad(
        held_tokens=held * PROMPT,
        kv_tokens=(held + running) * (PROMPT + OUTPUT),
        arrived_calls=10_000,
        arrived_tokens=10_000 * PROMPT,
        service_s=4.0,
    )
    return VersionDemand(in_flight=running, held=held, tokens=tokens)


def make_planner(world: World) -> ScalingPlanner:
    """Return a planner that has planned before, in the same cluster without queued calls."""
    numbers = count()
    planner = ScalingPlanner(PolicyBySetting(), lambda key: f"{key}-{next(numbers)}")
    for node, loads in world.loads.items():
        planner.outlook.capacities.put(node, loads)
    idle = {key: make_demand(0, one.in_flight) for key, one in world.demand.items()}
    planner.plan(world.cache, idle, {}, 0.0)
    return planner


@dataclass(slots=True)
class Step:
    """One repetition: a planner, and the plan that it makes."""

    world: World
    planner: ScalingPlanner
    plan: Plan | None = None

    def loads(self) -> dict[VersionKey, FunctionLoad]:
        self.planner.outlook.begin(self.world.cache, NOW_S)
        return function_loads(self.world.cache, self.world.demand, {}, (), self.planner.outlook)

    def decide(self) -> None:
        decide(self.loads())

    def make_plan(self) -> None:
        self.plan = self.planner.plan(self.world.cache, self.world.demand, {}, NOW_S)

    def add_copies_and_casts(self) -> None:
        assert self.plan is not None
        Replicator(self.planner).plan(self.world.cache, self.plan, NOW_S, NOW_S)
        CastPlanner().plan(self.world.cache, self.plan, self.planner.loading, NOW_S)


def decide(loads: dict[VersionKey, FunctionLoad]) -> None:
    policy = PolicyBySetting()
    for load in loads.values():
        policy.decide(load, PolicyState(), NOW_S)


def measure(name: str, world: World, repeat: int, params: Record) -> list[Record]:
    """Return the records of one state of the cluster."""
    seconds: dict[str, list[float]] = {"policy": [], "decision": [], "plan": [], "controller": []}
    starts = prefetches = 0
    for _ in range(repeat):
        step = Step(world, make_planner(world))
        seconds["policy"].append(timed_s(partial(decide, step.loads())))
        seconds["decision"].append(timed_s(step.decide))
        seconds["plan"].append(timed_s(step.make_plan))
        assert step.plan is not None
        starts = sum(isinstance(action, StartAction) for action in step.plan.actions)
        seconds["controller"].append(seconds["plan"][-1] + timed_s(step.add_copies_and_casts))
        prefetches = sum(isinstance(action, PrefetchAction) for action in step.plan.actions)
    limits = {"policy": LIMIT_S, "decision": LIMIT_S}
    return [
        timed(f"{part} {name}", params, found, limits.get(part), starts=starts, prefetches=prefetches)
        for part, found in seconds.items()
    ]


def timed_s(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def run(args: Namespace) -> list[Record]:
    params = all_but(args) | {"run": describe_run("benchmarks.policy_scale")}
    found = []
    for name, busy_share in (("quiet", 0.0), ("burst", 0.1)):
        world = make_world(args.functions, args.nodes, busy_share, random.Random(args.seed))
        found += measure(name, world, args.repeat, params)
    return found


def show(row: Record) -> str:
    """Format a record as one line."""
    worst_s = max(row["seconds"])
    return (
        f"{row['name']:20} median {row['median_s'] * 1e3:7.1f} ms, worst {worst_s * 1e3:7.1f} ms, "
        f"{row['starts']} starts"
    )


def main() -> None:
    parser = benchmark_parser("benchmarks.policy_scale", __doc__)
    parser.add_argument("--functions", type=at_least(1), default=200, help="functions")
    parser.add_argument("--nodes", type=at_least(2), default=1000, help="nodes")
    parser.add_argument("--repeat", type=at_least(1), default=7, help="repetitions")
    parser.add_argument("--seed", type=int, default=1, help="seed of the placement and the demand")
    args = parser.parse_args()
    with recording("policy-scale", json=args.json, show=show) as out:
        out.add(*run(args))


if __name__ == "__main__":
    main()
