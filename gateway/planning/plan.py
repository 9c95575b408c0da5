"""What a step of the control loop takes, remembers and gives."""

from dataclasses import dataclass, field

from gateway.actions import Action
from gateway.directory import VersionKey
from registry.function import Scaling, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """`max_starts` is how many starts in a row may fail before a wished number is given up.

    An instance serves `max(target_concurrency, batch)` calls at once, at most `max_batch`: an engine
    batches, so a call that waits for a second instance is better off on the first meanwhile. A
    handler serves exactly its target. After `no_source_s` without a node that holds or could read an
    image its calls are told so; until then such a node may come back.
    """

    max_starts: int = 3
    batch: int = 8
    max_batch: int = 256
    drain_grace_s: float = 600.0
    delete_grace_s: float = 30.0
    record_wait_s: float = 10.0
    wish_age_s: float = 15.0
    no_source_s: float = 5.0
    penalty_s: float = 1.0
    max_penalty_s: float = 60.0

    def max_concurrency(self, task: Task, scaling: Scaling) -> int:
        """How many calls an instance serves at once."""
        if task is Task.HANDLER:
            return scaling.target_concurrency
        return min(self.max_batch, max(scaling.target_concurrency, self.batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDemand:
    """Calls of one version over all gateways."""

    in_flight: int = 0
    held: int = 0

    @property
    def calls(self) -> int:
        return self.in_flight + self.held


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A start asked for whose record has not shown up; once the node said ready, it must by `until`."""

    key: VersionKey
    node: str
    image: str | None
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalty:
    """A node on which starts of a version failed `count` times in a row; none there before `until`."""

    until: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Nodes that an operator named for a number of instances."""

    on: tuple[str, ...]
    instances: int


@dataclass(slots=True, kw_only=True)
class Plan:
    """The outcome of one step; `next_at` is when to plan again if nothing happens before."""

    actions: list[Action] = field(default_factory=list)
    desired: dict[VersionKey, int] = field(default_factory=dict)
    next_at: float | None = None

    def again_at(self, when: float | None) -> None:
        if when is not None:
            self.next_at = when if self.next_at is None else min(self.next_at, when)
