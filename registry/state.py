"""The shared state as a seam: everything gateways and nodes know of each other.

`RedisState` (registry/redis_state.py) is the real one, `MemoryState` (registry/memory_state.py) the
fake beside it; both pass one contract suite. Every method may raise StateUnavailable; after it the
caller may simply try again, since every write is idempotent. A cancelled call leaves no half-read
connection behind.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from registry.api_key import ApiKey
from registry.change import Change, Demand, ScaleTarget, Snapshot
from registry.function import Function, FunctionVersion, Scaling
from registry.instance import InstanceRecord
from registry.node import NodeRecord
from registry.usage import InstanceInterval, Rate, RequestRecord


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
    """Functions, nodes, instances, demand, leases and the feed of their changes."""

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

    async def put_node(self, record: NodeRecord, ttl_s: float) -> None:
        """Heartbeat. Raises StaleEpoch if a later epoch of the node is known."""
        ...

    async def remove_node(self, node: str, epoch: int) -> None:
        """Forget the node and its instances, unless a later epoch is known."""
        ...

    async def put_instance(self, record: InstanceRecord, node_epoch: int) -> None:
        """Publish an instance; a final state deletes the record. Raises StaleEpoch."""
        ...

    async def put_demand(self, gateway: str, demands: Sequence[Demand], ttl_s: float) -> None: ...

    async def ask_scale(self, target: ScaleTarget) -> None: ...

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


class Ledger(Protocol):
    """The usage ledger: append-only, idempotent by id."""

    async def add_request(self, record: RequestRecord) -> bool:
        """Add the record and its sums, atomically. False if that request_id is there already."""
        ...

    async def request(self, request_id: str) -> RequestRecord: ...

    async def requests(
        self, where: UsageFilter, *, limit: int = 1000, cursor: str = ""
    ) -> tuple[list[RequestRecord], str]:
        """Records in order of `ended_at`, and the cursor of the next page ("" at the end)."""
        ...

    async def report(self, where: UsageFilter) -> list[UsageRow]:
        """Sums by function and tenant, ordered by both."""
        ...

    async def add_interval(self, interval: InstanceInterval) -> bool:
        """Add an instance interval; its identity is (instance_id, state, from_at)."""
        ...

    async def intervals(
        self, *, since: float | None = None, until: float | None = None
    ) -> list[InstanceInterval]: ...

    async def rates(self) -> list[Rate]: ...

    async def put_rate(self, rate: Rate) -> None:
        """Rates are immutable: a new price is a new id. Raises Conflict for a changed rate of a known id."""
        ...


class State(ClusterState, KeyState, Ledger, Protocol):
    """All of it, over one connection pool."""

    async def ping(self) -> None: ...

    async def aclose(self) -> None: ...
