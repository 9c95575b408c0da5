"""An instance: one function version on one node, in a state of its life cycle."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from registry.errors import InvalidRecord
from registry.records.engine import EngineKind


class InstanceState(StrEnum):
    """The life cycle of an instance."""

    STARTING = "starting"  # accepted by the node, reserving its region
    LOADING = "loading"  # bytes of the image are arriving
    READY = "ready"  # serves requests
    DRAINING = "draining"  # finishes its requests, takes no new ones
    STOPPED = "stopped"  # ended by request
    FAILED = "failed"  # ended by a fault, described by `error`


TRANSITIONS: Mapping[InstanceState, frozenset[InstanceState]] = {
    InstanceState.STARTING: frozenset({InstanceState.LOADING, InstanceState.STOPPED, InstanceState.FAILED}),
    InstanceState.LOADING: frozenset({InstanceState.READY, InstanceState.STOPPED, InstanceState.FAILED}),
    InstanceState.READY: frozenset({InstanceState.DRAINING, InstanceState.FAILED}),
    InstanceState.DRAINING: frozenset({InstanceState.STOPPED, InstanceState.FAILED}),
    InstanceState.STOPPED: frozenset(),
    InstanceState.FAILED: frozenset(),
}


class StartKind(StrEnum):
    """Where the weights were when a request arrived or its instance started."""

    HOT = "hot"  # on the accelerator
    WARM = "warm"  # in this node's host memory
    COLD = "cold"  # elsewhere: another node, disk or the store
    LIVE = "live"  # served while the weights were still arriving


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A member of a group: `instance_id`, on `node`, holds and runs the layers `[first, last)`.

    They are `image_bytes` bytes of the image.
    """

    node: str
    instance_id: str
    first: int
    last: int
    image_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """The members of an instance that is spread over several nodes, in layer order.

    `head` is the index of the member with the LM head, which takes the calls of all.
    """

    members: tuple[GroupMember, ...]
    head: int

    @property
    def leader(self) -> GroupMember:
        return self.members[self.head]

    def member(self, instance_id: str) -> GroupMember:
        """Return the member with that id. Raises InvalidRecord."""
        for member in self.members:
            if member.instance_id == instance_id:
                return member
        raise InvalidRecord(f"instance {instance_id} is no member of its group")

    def others(self, instance_id: str) -> tuple[GroupMember, ...]:
        """Return the members other than the one with that id."""
        return tuple(member for member in self.members if member.instance_id != instance_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRecord:
    """The record that a node publishes of one of its instances.

    `phases_ms` maps start phases to durations: `reserve`, `fetch` (into host memory), `copy` (host to
    accelerator), `bind`, `ready`. `progress` is the loaded share of the image, 0 to 1. `source` is where the
    bytes came from (`arena`, `host`, `node:<id>`, `disk`, `store`). `no_room`: the start failed for lack of
    arena space; the controller frees space, tries another node, or publishes the failure. `kv_tokens` is the
    size of its KV cache, 0 if unknown or none. `engine` is what serves its calls now. `group` has the members
    of an instance that is spread over nodes; each of them has such a record.
    """

    instance_id: str
    function: str
    version: int
    node: str
    state: InstanceState
    start_kind: StartKind
    since: float
    source: str = ""
    progress: float = 0.0
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    no_room: bool = False
    max_concurrency: int = 0
    kv_tokens: int = 0
    engine: EngineKind = EngineKind.NATIVE
    group: InstanceGroup | None = None

    @property
    def takes_calls(self) -> bool:
        """Whether calls are sent to it once it is ready: of a group to one member, which counts for all."""
        return self.group is None or self.group.leader.instance_id == self.instance_id

    @property
    def helpers(self) -> tuple[GroupMember, ...]:
        """The other members of its group, which run a part of each of its calls."""
        return () if self.group is None else self.group.others(self.instance_id)


def check_transition(old: InstanceState, new: InstanceState) -> InstanceState:
    """Return `new`, or raise InvalidRecord if the life cycle does not allow the step."""
    if new not in TRANSITIONS[old]:
        raise InvalidRecord(f"an instance cannot go from {old} to {new}")
    return new
