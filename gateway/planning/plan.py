"""Settings, records and the outcome of a planning step."""

from dataclasses import dataclass, field

from gateway.cluster.state_cache import VersionKey
from gateway.planning.actions import Action
from gateway.planning.policy import FunctionLoad, ScalingDecision
from gateway.planning.work import NO_TOKENS, TokenLoad
from registry.records.function import FunctionTask, Scaling, ScalingMode
from registry.records.live import InstanceRole


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Settings of the planner.

    After `max_starts` failed starts in a row a requested number of instances is dropped. An instance serves
    `max(target_concurrency, batch)` concurrent calls, at most `max_batch`: an engine batches, so a call is
    better off on the first instance while a second one starts. Where the load decides, it serves as many as
    `load_batch`: prompts are paced and KV cache is counted besides. A handler serves exactly its target.
    Calls fail after `no_source_s` without a node that holds or can read the image; until then such a node may
    come back. A version without any instance takes a node of the one with the most once its calls have waited
    for `share_after_s` and for as long as a start takes (docs/OPERATIONS.md). A version that requests no
    longer go to keeps its instances for `late_calls_s`: requests that chose it before would start it again.
    """

    max_starts: int = 3
    batch: int = 8
    load_batch: int = 64
    max_batch: int = 256
    drain_grace_s: float = 600.0
    delete_grace_s: float = 30.0
    record_wait_s: float = 10.0
    no_source_s: float = 5.0
    share_after_s: float = 5.0
    late_calls_s: float = 1.0
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0

    def max_concurrency(self, task: FunctionTask, scaling: Scaling) -> int:
        """Return the number of concurrent calls of an instance."""
        if task is FunctionTask.HANDLER:
            return scaling.target_concurrency
        by_load = scaling.policy is ScalingMode.LOAD and task is FunctionTask.GENERATE
        batch = self.load_batch if by_load else self.batch
        return min(self.max_batch, max(scaling.target_concurrency, batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDemand:
    """The calls of one version over all gateways, and the same in tokens."""

    in_flight: int = 0
    held: int = 0
    tokens: TokenLoad = NO_TOKENS

    @property
    def calls(self) -> int:
        return self.in_flight + self.held


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStart:
    """A requested start without a record; once the node reported it as ready, one must appear by `until`.

    The node will have the whole `image`; a member of a group (then it is None) has `part_bytes` of one. Of a
    group one member `counts` as the instance.
    """

    key: VersionKey
    node: str
    image: str | None
    until: float | None = None
    part_bytes: int | None = None
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAffinity:
    """The nodes that an operator named for a number of instances."""

    on: tuple[str, ...]
    instances: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedLoad:
    """A decision of the scaling policy, and the load that it was made for."""

    decision: ScalingDecision
    load: FunctionLoad


@dataclass(slots=True, kw_only=True)
class Plan:
    """The outcome of one step; `next_at` is when to plan again if nothing changes before."""

    actions: list[Action] = field(default_factory=list)
    desired: dict[VersionKey, int] = field(default_factory=dict)
    decisions: dict[VersionKey, DecidedLoad] = field(default_factory=dict)
    paused: dict[str, bool] = field(default_factory=dict)  # instances to route no calls to, or calls again
    roles: dict[VersionKey, dict[str, InstanceRole]] = field(default_factory=dict)  # of instances, by id
    next_at: float | None = None

    def replan_at(self, when: float | None) -> None:
        """Plan again at `when` at the latest."""
        if when is not None:
            self.next_at = when if self.next_at is None else min(self.next_at, when)
