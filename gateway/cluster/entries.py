"""Entries of the state cache: nodes and scale requests."""

from dataclasses import dataclass

from registry.records.change import ScaleTarget
from registry.records.node import NodeRecord, NodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEntry:
    """A node; `channel_epoch` is the node epoch that our channel is connected to, 0 for none."""

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
class ReceivedScaleRequest:
    """An operator's scale target and until when it is valid (monotonic)."""

    target: ScaleTarget
    deadline_s: float
