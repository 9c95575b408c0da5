"""Changes of the shared state as they enter the change feed, and the snapshot that it starts from."""

from dataclasses import dataclass

from registry.records.cast import CastProgress, CastRecord
from registry.records.function import Function, FunctionVersion
from registry.records.instance import InstanceRecord
from registry.records.live import LiveRecord
from registry.records.node import NodeRecord

# For so long a scale request may wait for a controller that carries it out.
SCALE_REQUEST_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTraffic:
    """What a gateway has served of one version since its start, in counts that only grow.

    `first_tokens` requests have had their first token, after `first_token_s` in all. Of those that have
    `ended`, `errors` did so by a fault of the platform or the function, not of their caller.
    """

    requests: int = 0
    output_tokens: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0
    ended: int = 0
    errors: int = 0

    def __add__(self, other: "CallTraffic") -> "CallTraffic":
        return CallTraffic(
            requests=self.requests + other.requests,
            output_tokens=self.output_tokens + other.output_tokens,
            first_tokens=self.first_tokens + other.first_tokens,
            first_token_s=self.first_token_s + other.first_token_s,
            ended=self.ended + other.ended,
            errors=self.errors + other.errors,
        )

    def __sub__(self, other: "CallTraffic") -> "CallTraffic":
        return CallTraffic(
            requests=self.requests - other.requests,
            output_tokens=self.output_tokens - other.output_tokens,
            first_tokens=self.first_tokens - other.first_tokens,
            first_token_s=self.first_token_s - other.first_token_s,
            ended=self.ended - other.ended,
            errors=self.errors - other.errors,
        )


NO_TRAFFIC = CallTraffic()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLoad:
    """The load of one function version at one gateway: requests in flight on instances, and queued ones.

    `held_tokens` are the prompt tokens of queued requests, `prefilling_tokens` those of requests in flight
    without a first token, `kv_tokens` the prompts and expected outputs of all of them. `arrived_…` count all
    requests and prompt tokens since the gateway started (0: it is of an earlier release, or of none that
    generate). A request usually takes `service_s` on an instance (None: unknown). `traffic` is for people to
    see, and by which rollouts are judged: scaling does not read it.
    """

    function: str
    version: int
    in_flight: int
    held: int
    held_tokens: int = 0
    prefilling_tokens: int = 0
    kv_tokens: int = 0
    arrived_calls: int = 0
    arrived_tokens: int = 0
    service_s: float | None = None
    traffic: CallTraffic = NO_TRAFFIC


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTarget:
    """An operator's scale request: a number of instances of the current version, on these nodes if named."""

    function: str
    instances: int
    on: tuple[str, ...] = ()
    token: str  # unique per request, so that it is carried out once


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUp:
    """A heartbeat (also the first one): the node's record, valid for `ttl_s` from its arrival."""

    record: NodeRecord
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGone:
    """The removal or expiry of an epoch of a node."""

    id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceChanged:
    """A new record of an instance; with a final state (stopped, failed) it is already deleted."""

    record: InstanceRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionChanged:
    """A new head of a function; `version` is the record of its current version, or of one just added."""

    function: Function
    version: FunctionVersion

    @property
    def schema(self) -> int:
        return max(self.function.schema, self.version.schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionDeleted:
    """The deletion of a function with all its versions."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The whole load of one gateway, valid for `ttl_s`.

    Versions without load are omitted, but for those of a rollout in progress that had requests.
    """

    gateway: str
    loads: tuple[VersionLoad, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequested:
    """A scale request of an operator, valid for `ttl_s` from its arrival."""

    target: ScaleTarget
    ttl_s: float = SCALE_REQUEST_S


@dataclass(frozen=True, slots=True, kw_only=True)
class CastChanged:
    """A new cast, or one that nodes joined."""

    record: CastRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CastPartEnded:
    """The end of a node's part in a cast, with its final progress; it may be published more than once."""

    progress: CastProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveChanged:
    """The live serving of a function version with all its pipelines, valid for `ttl_s`."""

    record: LiveRecord
    ttl_s: float


Change = (
    NodeUp
    | NodeGone
    | InstanceChanged
    | FunctionChanged
    | FunctionDeleted
    | LoadReport
    | ScaleRequested
    | CastChanged
    | CastPartEnded
    | LiveChanged
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole shared state at one point of the feed; `cursor` is where to watch from.

    Of scale requests it has the last valid one of each function: a controller that follows the feed only from
    `cursor` on carries these out.
    """

    cursor: str
    functions: tuple[Function, ...]
    versions: tuple[FunctionVersion, ...]
    nodes: tuple[NodeUp, ...]
    instances: tuple[InstanceRecord, ...]
    load_reports: tuple[LoadReport, ...]
    casts: tuple[CastRecord, ...] = ()
    live: tuple[LiveChanged, ...] = ()
    scale_requests: tuple[ScaleRequested, ...] = ()
