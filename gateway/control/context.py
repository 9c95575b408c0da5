"""Grouped dependencies of the control side."""

from dataclasses import dataclass

from gateway.dispatch.admission import Admission
from gateway.dispatch.progress import StartProgress
from gateway.dispatch.router import ReplicaSlots
from gateway.live.coordinator import LiveCoordinator
from gateway.planning.cast_planner import CastPlanner
from gateway.planning.planner import ScalingPlanner
from gateway.planning.replicator import Replicator
from gateway.planning.rollout_monitor import RolloutMonitor


@dataclass(frozen=True, slots=True, kw_only=True)
class Planners:
    """The parts of a planning step, in the order in which the controller runs them."""

    scaling: ScalingPlanner
    replicator: Replicator
    casts: CastPlanner
    live: LiveCoordinator
    rollouts: RolloutMonitor


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLoad:
    """The load of this gateway itself, which does not pass through the change feed."""

    gateway_id: str
    admission: Admission
    slots: ReplicaSlots
    progress: StartProgress
