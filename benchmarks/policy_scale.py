"""Time a planning decision at a size that no test cluster has: by default 200 functions on 1,000 nodes.

The state cache, the reports of nodes and the demand of gateways are real records in memory; nothing is
started. Records: `policy` is the scaling policy alone, for all functions; `decision` is all that decides the
numbers of instances (loads of all functions, capacities, policy); `plan` also chooses the nodes of starts and
the instances to stop, `controller` is one step of the control loop: plan, host copies and casts. `quiet` is a
step that starts nothing, `burst` one in which a tenth of the functions need more instances at once, `full`
the same where no node has space for them. Each repetition has its own planner, which has planned ten seconds
of steady load before; since its last step a tenth of the nodes have sent a heartbeat. If a median is above
its limit, the exit status is 1.

example:
  python -m benchmarks.policy_scale --functions 200 --nodes 1000 --json policy-scale.json
"""

import hashlib
import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from benchmarks.harness.arguments import at_least, benchmark_parser, positive
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
GPU_BYTES = 80 * GIB
HISTORY_S, STEP_S = 10.0, 0.5  # that each planner has planned, and the time between its steps
CALLS_S = 2.0  # arrivals at each instance


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A cluster as the controller sees it: its state, the demand, and the loads of instances by node."""

    cache: ClusterStateCache
    demand: dict[VersionKey, VersionDemand]
    loads: dict[str, tuple[InstanceLoad, ...]]
    records: list[NodeRecord]

    def beat(self, rng: random.Random) -> None:
        """Apply the heartbeats of a tenth of the nodes."""
        for record in rng.sample(self.records, -(-len(self.records) // 10)):
            self.cache.apply(NodeUp(record=replace(record), ttl_s=1e6), HISTORY_S)


class OverLimit(Exception):
    """A part of a step takes longer than its limit."""


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_world(
    functions: int, nodes: int, rng: random.Random, *, busy_share: float = 0.0, full: bool = False
) -> World:
    """Return a cluster in which half of the nodes, or all, run an instance; `busy_share` have a burst."""
    cache = ClusterStateCache()
    versions = [make_version(f"f{number}") for number in range(functions)]
    holdings: dict[int, list[CachedImage]] = {}
    placed = [(versions[number % functions], number) for number in range(nodes if full else nodes // 2)]
    for version, number in placed:
        holdings.setdefault(number, []).append(holding(version, Tier.GPU, Tier.HOST))
    for version in versions:
        for number in rng.sample(range(nodes), COPIES):
            if all(held.image != version.image for held in holdings.get(number, ())):
                holdings.setdefault(number, []).append(holding(version, Tier.HOST))
    gpu_bytes = 2 * IMAGE_BYTES if full else GPU_BYTES  # an image and its KV cache
    records = [make_node(number, tuple(holdings.get(number, ())), gpu_bytes) for number in range(nodes)]
    for record in records:
        cache.apply(NodeUp(record=record, ttl_s=1e6), 0.0)
        cache.channel_up(record.id, record.epoch)
    counts = Counter(version.function for version, _ in placed)
    for version in versions:
        # Idle ones stay, so that a quiet step stops nothing.
        scaling = Scaling(policy=ScalingMode.LOAD, min_instances=counts[version.function])
        head = Function(name=version.function, current=1, versions=(1,), scaling=scaling)
        cache.apply(FunctionChanged(function=head, version=version), 0.0)
    loads = dict[str, tuple[InstanceLoad, ...]]()
    for version, number in placed:
        record_, load = make_instance(version, number)
        cache.apply(InstanceChanged(record=record_), 0.0)
        loads[record_.node] = (load,)
    busy = rng.sample(versions, round(functions * busy_share))
    demand = {}
    for version in versions:
        key = VersionKey(version.function, 1)
        held = rng.randint(60, 120) if version in busy else 0
        demand[key] = make_demand(held, counts[version.function], HISTORY_S)
    return World(cache=cache, demand=demand, loads=loads, records=records)


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


def make_node(number: int, holdings: tuple[CachedImage, ...], gpu_bytes: int) -> NodeRecord:
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
        gpu_bytes=gpu_bytes,
        gpu_free_bytes=gpu_bytes - 2 * on_gpu,
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


def make_demand(held: int, instances: int, at_s: float) -> VersionDemand:
    """Return the demand after `at_s` of steady arrivals, and of `held` calls at once."""
    running, arrived = 8 * instances, round(CALLS_S * instances * at_s) + held
    tokens = TokenLoad(
        held_tokens=held * PROMPT,
        kv_tokens=(held + running) * (PROMPT + OUTPUT),
        arrived_calls=arrived,
        arrived_tokens=arrived * PROMPT,
        service_s=4.0,
    )
    return VersionDemand(in_flight=running, held=held, tokens=tokens)


def make_planner(world: World) -> tuple[ScalingPlanner, dict[VersionKey, PolicyState]]:
    """Return a planner that has planned before, in the same cluster without queued calls, and its states."""
    numbers = count()
    planner = ScalingPlanner(PolicyBySetting(), lambda key: f"{key}-{next(numbers)}")
    for node, loads in world.loads.items():
        planner.outlook.capacities.put(node, loads)
    for record in world.cache.instances():
        planner.outlook.times.on_ready(record)
    plan = Plan()
    for step in range(round(HISTORY_S / STEP_S)):
        idle = {key: make_demand(0, one.in_flight // 8, step * STEP_S) for key, one in world.demand.items()}
        plan = planner.plan(world.cache, idle, {}, step * STEP_S)
    return planner, {key: one.decision.state for key, one in plan.decisions.items()}


@dataclass(slots=True)
class Step:
    """One repetition: a planner, and the plan that it makes."""

    world: World
    planner: ScalingPlanner
    states: dict[VersionKey, PolicyState]
    plan: Plan | None = None

    def loads(self) -> dict[VersionKey, FunctionLoad]:
        self.planner.outlook.begin(self.world.cache, HISTORY_S)
        return function_loads(self.world.cache, self.world.demand, {}, (), self.planner.outlook)

    def decide(self) -> None:
        self.apply_policy(self.loads())

    def apply_policy(self, loads: dict[VersionKey, FunctionLoad]) -> None:
        policy = PolicyBySetting()
        for key, load in loads.items():
            policy.decide(load, self.states[key], HISTORY_S)

    def make_plan(self) -> None:
        self.plan = self.planner.plan(self.world.cache, self.world.demand, {}, HISTORY_S)

    def add_copies_and_casts(self) -> None:
        assert self.plan is not None
        Replicator(self.planner).plan(self.world.cache, self.plan, HISTORY_S, HISTORY_S)
        CastPlanner().plan(self.world.cache, self.plan, self.planner.loading, HISTORY_S)


def measure(name: str, world: World, args: Namespace, params: Record) -> list[Record]:
    """Return the records of one state of the cluster."""
    seconds: dict[str, list[float]] = {"policy": [], "decision": [], "plan": [], "controller": []}
    starts = prefetches = 0
    for _ in range(args.repeat):
        step = Step(world, *make_planner(world))
        world.beat(random.Random(args.seed))
        seconds["policy"].append(timed_s(partial(step.apply_policy, step.loads())))
        seconds["decision"].append(timed_s(step.decide))
        seconds["plan"].append(timed_s(step.make_plan))
        assert step.plan is not None
        starts = sum(isinstance(action, StartAction) for action in step.plan.actions)
        seconds["controller"].append(seconds["plan"][-1] + timed_s(step.add_copies_and_casts))
        prefetches = sum(isinstance(action, PrefetchAction) for action in step.plan.actions)
    limit_s = args.limit_ms / 1e3
    return [
        timed(f"{part}-{name}", params, found, limit_s, starts=starts, prefetches=prefetches)
        for part, found in seconds.items()
    ]


def timed_s(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def run(args: Namespace) -> Iterator[Record]:
    """Yield the records of all states. Raises OverLimit at the end if a median is above its limit."""
    params = all_but(args) | {"run": describe_run("benchmarks.policy_scale")}
    over: list[str] = []
    for name, busy_share in (("quiet", 0.0), ("burst", 0.1), ("full", 0.1)):
        rng = random.Random(args.seed)
        world = make_world(args.functions, args.nodes, rng, busy_share=busy_share, full=name == "full")
        for row in measure(name, world, args, params):
            over += [row["name"]] if row["ratio_to_limit"] > 1 else []
            yield row
    if over:
        raise OverLimit(f"above the limit of {args.limit_ms:g} ms: {', '.join(over)}")


def show(row: Record) -> str:
    """Format a record as one line."""
    worst_s = max(row["seconds"])
    return (
        f"{row['name']:20} median {row['median_s'] * 1e3:7.1f} ms, worst {worst_s * 1e3:7.1f} ms, "
        f"{row['starts']} starts"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("benchmarks.policy_scale", __doc__)
    parser.add_argument("--functions", type=at_least(1), default=200, help="functions")
    parser.add_argument("--nodes", type=at_least(2), default=1000, help="nodes")
    parser.add_argument("--repeat", type=at_least(1), default=7, help="repetitions")
    parser.add_argument("--seed", type=int, default=1, help="seed of the placement and the demand")
    parser.add_argument("--limit-ms", type=positive, default=50.0, help="of the median of each part")
    args = parser.parse_args(argv)
    with recording("policy-scale", json=args.json, show=show, failures=(OverLimit,)) as out:
        for row in run(args):
            out.add(row)


if __name__ == "__main__":
    main()
