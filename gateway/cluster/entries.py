"""What the directory keeps of a node, a failed start, an operator's wish and a gateway's demand."""

from dataclasses import dataclass

from registry.change import Demand, ScaleTarget
from registry.node import NodeRecord, NodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEntry:
    """A node as known here; `channel_epoch` is the epoch that our channel reached, 0 for none."""

    record: NodeRecord
    ttl_s: float
    deadline_s: float
    channel_epoch: int = 0

    @property
    def reached(self) -> bool:
        return self.channel_epoch == self.record.epoch

    @property
    def usable(self) -> bool:
        return self.reached and self.record.state is NodeState.READY


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailure:
    """A start that failed. `node` is "" if the node itself was lost, which is not the function's fault."""

    serial: int
    instance_id: str
    node: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """An operator's scale target and when it arrived here."""

    target: ScaleTarget
    arrived_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDemand:
    demands: tuple[Demand, ...]
    ttl_s: float
    deadline_s: float
