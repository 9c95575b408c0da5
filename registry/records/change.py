"""The change feed: what changed in the shared state, in order."""

from dataclasses import dataclass

from registry.cast import CastProgress, CastRecord
from registry.function import Function, FunctionVersion
from registry.instance import InstanceRecord
from registry.live import LiveRecord
from registry.node import NodeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one gateway has of one function now: requests in flight on instances and requests held."""

    gateway: str
    function: str
    version: int
    in_flight: int
    held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTarget:
    """An operator's wish: this many instances of the current version now, on these nodes if named."""

    function: str
    instances: int
    on: tuple[str, ...] = ()
    token: str = ""  # unique per wish, so that one is carried out once


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUp:
    """A heartbeat (also the first one): the node's record, valid for `ttl_s` from its arrival."""

    record: NodeRecord
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGone:
    id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceChanged:
    """The record's `state` may be final (stopped, failed): then the record is already deleted."""

    record: InstanceRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionChanged:
    """A function's head changed; `version` is its current version's record."""

    function: Function
    version: FunctionVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionDeleted:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandChanged:
    """All of one gateway's demand (functions without any are left out), valid for `ttl_s`."""

    gateway: str
    demands: tuple[Demand, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAsked:
    target: ScaleTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class CastChanged:
    """A cast was planned, or nodes joined it."""

    record: CastRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CastPartEnded:
    """A node's part in a cast is over: `progress` is its last word. It may be told more than once."""

    progress: CastProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveChanged:
    """How a function version serves while it loads, valid for `ttl_s`: all of its pipelines."""

    record: LiveRecord
    ttl_s: float


Change = (
    NodeUp
    | NodeGone
    | InstanceChanged
    | FunctionChanged
    | FunctionDeleted
    | DemandChanged
    | ScaleAsked
    | CastChanged
    | CastPartEnded
    | LiveChanged
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole shared state at one point of the feed; `cursor` is where to watch from."""

    cursor: str
    functions: tuple[Function, ...]
    versions: tuple[FunctionVersion, ...]
    nodes: tuple[NodeUp, ...]
    instances: tuple[InstanceRecord, ...]
    demands: tuple[DemandChanged, ...]
    casts: tuple[CastRecord, ...] = ()
    live: tuple[LiveChanged, ...] = ()
