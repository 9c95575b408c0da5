"""An instance: one function version on one node, in a state of its life cycle."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from registry.errors import InvalidRecord


class InstanceState(StrEnum):
    STARTING = "starting"  # accepted by the node; reserving its region
    LOADING = "loading"  # bytes of the image are arriving
    READY = "ready"  # serves requests
    DRAINING = "draining"  # finishes what it has, takes nothing new
    STOPPED = "stopped"  # gone, on purpose
    FAILED = "failed"  # gone, by a fault that `error` names


TRANSITIONS: Mapping[InstanceState, frozenset[InstanceState]] = {
    InstanceState.STARTING: frozenset({InstanceState.LOADING, InstanceState.STOPPED, InstanceState.FAILED}),
    InstanceState.LOADING: frozenset({InstanceState.READY, InstanceState.STOPPED, InstanceState.FAILED}),
    InstanceState.READY: frozenset({InstanceState.DRAINING, InstanceState.FAILED}),
    InstanceState.DRAINING: frozenset({InstanceState.STOPPED, InstanceState.FAILED}),
    InstanceState.STOPPED: frozenset(),
    InstanceState.FAILED: frozenset(),
}


class StartKind(StrEnum):
    """Where the weights were when a request came, or what its instance started from."""

    HOT = "hot"  # on the accelerator
    WARM = "warm"  # in this node's host memory
    COLD = "cold"  # elsewhere: another node, disk or the store
    LIVE = "live"  # served while the weights were still arriving


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRecord:
    """What a node publishes about one of its instances. `phases_ms` maps a start phase to its length.

    Phases: `reserve`, `fetch` (into host memory), `copy` (host to accelerator), `bind`, `ready`.
    `progress` is the loaded share of the image, 0 to 1. `source` says where the bytes came from
    (`arena`, `host`, `node:<id>`, `disk`, `store`). `no_room` says of a failed start that the arena had
    no room for it: whoever placed it there makes some, tries elsewhere, or tells that it gives up.
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


def check_transition(old: InstanceState, new: InstanceState) -> InstanceState:
    """Return `new`, or raise InvalidRecord if the life cycle does not allow the step."""
    if new not in TRANSITIONS[old]:
        raise InvalidRecord(f"an instance cannot go from {old} to {new}")
    return new
