"""The shared state as a seam: everything gateways and nodes know of each other.

`RedisState` (registry/redis_state.py) is the real one, `MemoryState` (registry/memory_state.py) the
fake beside it; both pass one contract suite. Every method may raise StateUnavailable; after it the
caller may simply try again, since every write is idempotent. A cancelled call leaves no half-read
connection behind.
"""

from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from registry.api_key import ApiKey, SpendPeriod
from registry.cast import CastProgress, CastRecord, CastStatus
from registry.change import Change, Demand, ScaleTarget, Snapshot
from registry.function import Function, FunctionVersion, Scaling
from registry.instance import InstanceRecord
from registry.live import LiveRecord
from registry.node import NodeRecord
from registry.quota import Place, Standing
from registry.usage import InstanceInterval, LostCall, Rate, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Set once at the cluster's first start; nodes that join read it from here."""

    cluster_id: str
    store_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """Which request records: Unix seconds `[since, until)` of `ended_at`, and equal fields where given."""

    since: float | None = None
    until: float | None = None
    function: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Sums over request records of one function and tenant."""

    function: str
    tenant: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    billed_gpu_ms: int
    cost_nanos: int


class ClusterState(Protocol):
    """Functions, nodes, instances, demand, casts, live pipelines, leases and the feed of their changes."""

    async def cluster_config(self, default: ClusterConfig | None = None) -> ClusterConfig:
        """The cluster's configuration; `default` becomes it if there is none. Raises NotFound."""
        ...

    async def create_version(
        self, draft: FunctionVersion, scaling: Scaling | None, *, make_current: bool = True
    ) -> FunctionVersion:
        """Store `draft` under the next free number and (atomically) make it current.

        `scaling=None` keeps the function's settings (defaults for a new function). A draft equal to
        the current version but for `version` and `created_at` makes no new version: the current one
        is returned (its scaling updated).
        """
        ...

    async def function(self, name: str) -> Function: ...

    async def functions(self) -> list[Function]: ...

    async def version(self, name: str, version: int | None = None) -> FunctionVersion:
        """A version, by default the current one. Raises NotFound."""
        ...

    async def versions(self, name: str | None = None) -> list[FunctionVersion]: ...

    async def set_current(self, name: str, version: int) -> Function: ...

    async def set_scaling(self, name: str, scaling: Scaling) -> Function: ...

    async def delete_function(self, name: str) -> None: ...

    async def next_node_epoch(self, node: str) -> int:
        """A number greater than any that this node id was given before."""
        ...

    async def put_node(self, record: NodeRecord, ttl_s: float) -> bool:
        """Heartbeat. Raises StaleEpoch if a later epoch of the node is known.

        False if nothing is known of the node's instances: those that it has are to be told again.
        """
        ...

    async def remove_node(self, node: str, epoch: int) -> None:
        """Forget the node and its instances, unless a later epoch is known."""
        ...

    async def put_instance(self, record: InstanceRecord, node_epoch: int) -> None:
        """Publish an instance; a final state deletes the record. Raises StaleEpoch."""
        ...

    async def put_demand(self, gateway: str, demands: Sequence[Demand], ttl_s: float) -> None: ...

    async def ask_scale(self, target: ScaleTarget) -> None: ...

    async def put_cast(self, record: CastRecord) -> None:
        """Publish a cast, which is kept for an hour from its last change. One of no later epoch than is
        known changes nothing."""
        ...

    async def put_cast_progress(self, progress: CastProgress) -> None:
        """Tell of a node's part; in the feed is its last word alone. What does not follow what is known
        (CastProgress) changes nothing."""
        ...

    async def casts(
        self, beginning: str = "", *, function: str | None = None, brief: bool = False
    ) -> list[CastStatus]:
        """Those that are kept, of the function if one is named, and whose ids begin so, the latest first.
        With `brief` only what its members told is read, without the details (CastDetails)."""
        ...

    async def put_live(self, record: LiveRecord, ttl_s: float) -> None:
        """Tell how a function version serves while it loads, for `ttl_s`. One that is older than what is
        known (LiveRecord.order) changes nothing; told again it holds for longer."""
        ...

    async def acquire_lease(self, name: str, holder: str, ttl_s: float) -> int | None:
        """Take or renew a lease: its epoch (greater at each change of holder), or None if taken."""
        ...

    async def release_lease(self, name: str, holder: str) -> None: ...

    async def snapshot(self) -> Snapshot: ...

    def watch(self, cursor: str) -> AsyncIterator[tuple[str, Change]]:
        """Changes after `cursor`, each with its own cursor, as they happen; never ends by itself.

        Raises NotFound when the feed no longer reaches back to `cursor`: take a new snapshot.
        """
        ...


class KeyState(Protocol):
    """API keys."""

    async def put_key(self, key: ApiKey) -> None: ...

    async def key(self, key_id: str) -> ApiKey: ...

    async def keys(self) -> list[ApiKey]: ...

    async def replace_key(self, before: ApiKey, after: ApiKey) -> None:
        """Put `after` in the place of `before`, its earlier record. Raises NotFound, and Conflict if the
        record is another by now: read it again."""
        ...


class QuotaState(Protocol):
    """What keys with limits have used, counted for the whole cluster.

    Time is the state's own (Redis' clock), so that no gateway's clock matters; but spending is counted
    by the UTC days and months of the records, and `now` (Unix seconds) names the period.
    """

    async def admit(self, key: ApiKey, place: str, *, ttl_s: float, now: float) -> Standing:
        """Judge one request by the key's limits and, unless it is refused, count it, atomically.

        Admitted, it holds a place of the key (`place` is unique among all requests) until that is
        released, or not kept for `ttl_s`. A refused request counts nowhere. Asked again for the same
        place it is admitted again, and counted once.
        """
        ...

    async def keep_places(self, places: Sequence[Place], *, ttl_s: float) -> None:
        """Hold these places for `ttl_s` from now, lapsed ones too: call it for none that was released."""
        ...

    async def release_places(self, places: Sequence[Place]) -> None:
        """Give places back; one that is not held is no error."""
        ...

    async def spent_nanos(self, key_id: str, period: SpendPeriod, now: float) -> int:
        """What the key's requests that ended in the period of `now` cost, by the ledger's records."""
        ...


class Ledger(Protocol):
    """The usage ledger: append-only (but for `void_request`), idempotent by id."""

    def add_request(self, record: RequestRecord) -> Awaitable[bool]:
        """Add the record and its sums, those of its key among them, and take its tokens off the key's
        rate, atomically. False if that request_id is there already."""
        ...

    async def void_request(self, record: RequestRecord) -> bool:
        """Where the ledger holds just this record, make it a failed one and take its cost out of the sums,
        atomically. False if it holds none such: call it for none that a client was told is good."""
        ...

    async def request(self, request_id: str) -> RequestRecord: ...

    async def requests(
        self, where: UsageFilter, *, limit: int = 1000, cursor: str = ""
    ) -> tuple[list[RequestRecord], str]:
        """Records in order of `ended_at`, and the cursor of the next page ("" at the end)."""
        ...

    async def requests_by_id(self, request_ids: Sequence[str]) -> list[RequestRecord]:
        """Those of these records that there are, in no order."""
        ...

    async def report(self, where: UsageFilter) -> list[UsageRow]:
        """Sums by function and tenant, ordered by both."""
        ...

    async def add_interval(self, interval: InstanceInterval) -> bool:
        """Add an instance interval; its identity is (instance_id, state, from_at)."""
        ...

    async def intervals(
        self, *, since: float | None = None, until: float | None = None
    ) -> list[InstanceInterval]:
        """The intervals that overlap `[since, until)`, in order of `from_at`."""
        ...

    def interval_pages(
        self, *, since: float | None = None, until: float | None = None
    ) -> AsyncIterator[list[InstanceInterval]]:
        """All that was read to find the same, some at a time, in order of `to_at`: others are among them."""
        ...

    async def add_lost_call(self, lost: LostCall) -> bool:
        """Add what a call used that its gateway may not know of. False if that id is there already."""
        ...

    async def lost_calls(self, *, since: float | None = None, until: float | None = None) -> list[LostCall]:
        """Those that ended in `[since, until)`, in order of `ended_at`."""
        ...

    def lost_call_pages(
        self, *, since: float | None = None, until: float | None = None
    ) -> AsyncIterator[list[LostCall]]:
        """The same, some at a time."""
        ...

    async def rates(self) -> list[Rate]: ...

    async def put_rate(self, rate: Rate) -> None:
        """Rates are immutable: a new price is a new id. Raises Conflict for a changed rate of a known id."""
        ...


class State(ClusterState, KeyState, QuotaState, Ledger, Protocol):
    """All of it, over one connection pool."""

    async def ping(self) -> None: ...

    async def aclose(self) -> None: ...
