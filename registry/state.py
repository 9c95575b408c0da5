"""Protocols of the shared state of gateways and nodes.

`RedisState` (registry/redis/state.py) is the real implementation, `MemoryState` (registry/memory/state.py)
the fake; both pass one contract suite. Every method may raise StateUnavailable and may then be retried, since
every write is idempotent. A cancelled call leaves no half-read connection.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from registry.records.api_key import ApiKey, SpendPeriod
from registry.records.audit import CHANGES, AuditEntry, AuditLogName, AuditOutcome, AuditPage, AuditQuery
from registry.records.batch import BatchCounts, BatchRecord, FileRecord
from registry.records.cast import CastProgress, CastRecord, CastStatus
from registry.records.change import SCALE_REQUEST_S, Change, ScaleTarget, Snapshot, VersionLoad
from registry.records.fence import NO_FENCE, Fence
from registry.records.function import Access, Function, FunctionVersion, Scaling
from registry.records.function_changes import AccessStep, keep_access
from registry.records.hook import HookClaims
from registry.records.instance import InstanceRecord
from registry.records.job import (
    HookStatus,
    Job,
    JobBounds,
    JobClaims,
    JobEvent,
    JobLease,
    JobOutcome,
    JobSpec,
    LeaseRenewal,
    LineResult,
    Submission,
)
from registry.records.job_counts import JobCounts
from registry.records.live import LiveRecord
from registry.records.node import NodeRecord
from registry.records.quota import ConcurrencyLease, RateLimitDecision
from registry.records.rollout_changes import RolloutStep
from registry.records.scaling import ScalingRecord
from registry.records.schema import BASE_SCHEMA, check_schema
from registry.records.secret import FunctionSecrets
from registry.records.usage import InstanceInterval, LostCall, PriceRate, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The cluster's configuration, set at its first start and read by nodes that join.

    `schema` is the highest that any of its records has needed (registry/records/schema.py).
    """

    cluster_id: str
    store_url: str
    schema: int = BASE_SCHEMA

    def check_readable(self) -> "ClusterConfig":
        """Return this configuration. Raises NewerSchema if a later release has raised the schema."""
        check_schema(self.schema)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """A filter of request records: `ended_at` in `[since, until)` (Unix seconds), and fields where set."""

    since: float | None = None
    until: float | None = None
    function: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Sums over the request records of one function and tenant."""

    function: str
    tenant: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    billed_gpu_ms: int
    cost_nanos: int


Tally: TypeAlias = tuple[tuple[str | int, ...], Sequence[int]]
"""Values of some fields, and what the records that have them add to the sums of a UsageRow, in its order."""


class UsageChunk(Protocol):
    """Some of the records that match a filter."""

    def tally(self, by: Sequence[str], *, counts: bool = False) -> AsyncIterator[Sequence[Tally]]:
        """Yield sums by some fields (`registry.accounting.usage_chunks.FIELDS`); a group may repeat.

        With `counts` the numbers of records alone.
        """
        ...


class SecretState(Protocol):
    """Secrets of functions, as ciphertext; a function's are deleted with it."""

    async def function_secrets(self, function: str) -> FunctionSecrets:
        """Return the secrets of a function, none if it has none."""
        ...

    async def functions_with_secrets(self) -> list[str]:
        """Return the names of functions which have secrets, deployed or not."""
        ...

    async def replace_secrets(self, before: FunctionSecrets, after: FunctionSecrets) -> bool:
        """Replace a function's secrets; return False if they were changed concurrently."""
        ...


class ClusterState(SecretState, Protocol):
    """Functions, nodes, instances, load reports, casts, live serving, leases and the feed of changes."""

    async def cluster_config(self, default: ClusterConfig | None = None) -> ClusterConfig:
        """Return the cluster's configuration, set to `default` if there is none.

        A lower schema is raised to that of `default`. Raises NotFound, and NewerSchema.
        """
        ...

    async def create_version(
        self,
        draft: FunctionVersion,
        scaling: Scaling | None,
        access: AccessStep = keep_access,
        *,
        unreserved: bool = False,
        becomes_current: bool = True,
    ) -> FunctionVersion:
        """Store `draft` under the next free number and (atomically) make it current, if asked for.

        `scaling=None` keeps the function's settings (defaults for a new function). `access` returns the
        access to store for the present one (None for a new function), or raises to refuse the version. A
        draft equal to the current version except for `version` and `created_at` creates no new version: the
        current one is returned, with scaling and access updated. The first version of a function is always
        made current. Raises Conflict for one that would be made current during a rollout and, with
        `unreserved`, for a new name that has secrets.
        """
        ...

    async def function(self, name: str) -> Function: ...

    async def functions(self) -> list[Function]: ...

    async def version(self, name: str, version: int | None = None) -> FunctionVersion:
        """Return a version, by default the current one. Raises NotFound."""
        ...

    async def versions(self, name: str | None = None) -> list[FunctionVersion]: ...

    async def set_current(self, name: str, version: int, *, at: float = 0.0) -> Function:
        """Make a version current; a rollout in progress is aborted (at that time)."""
        ...

    async def set_scaling(self, name: str, scaling: Scaling) -> Function: ...

    async def set_access(self, name: str, step: Callable[[Access], Access]) -> Function:
        """Replace (atomically) the function's access by that which `step` returns for it."""
        ...

    async def change_rollout(self, name: str, step: RolloutStep) -> Function:
        """Replace (atomically) a function's head by what `step` returns for it, or raise what that raises."""
        ...

    async def delete_function(self, name: str) -> None: ...

    async def next_node_epoch(self, node: str) -> int:
        """Return an epoch greater than all earlier ones of this node id."""
        ...

    async def put_node(self, record: NodeRecord, ttl_s: float) -> bool:
        """Store a heartbeat. Raises StaleEpoch if a later epoch of the node is known.

        Returns False if the node's instances are unknown, so that it has to publish them again.
        """
        ...

    async def remove_node(self, node: str, epoch: int) -> None:
        """Remove the node and its instances, unless a later epoch is known."""
        ...

    async def put_instance(self, record: InstanceRecord, node_epoch: int) -> None:
        """Publish an instance; a final state deletes the record. Raises StaleEpoch."""
        ...

    async def put_load_report(self, gateway: str, loads: Sequence[VersionLoad], ttl_s: float) -> None: ...

    async def request_scale(self, target: ScaleTarget, ttl_s: float = SCALE_REQUEST_S) -> None:
        """Publish a scale request, once per token; it is valid for `ttl_s`."""
        ...

    async def put_cast(self, record: CastRecord) -> None:
        """Publish a cast, which is kept for an hour after its last change.

        A record without a later epoch than the known one is ignored.
        """
        ...

    async def put_cast_progress(self, progress: CastProgress) -> None:
        """Publish the progress of a node's part; only the final one enters the feed.

        Progress that does not follow the known one (CastProgress.follows) is ignored.
        """
        ...

    async def casts(
        self, prefix: str = "", *, function: str | None = None, brief: bool = False
    ) -> list[CastStatus]:
        """Return casts with an id that begins with `prefix`, of the function if set, the latest first.

        With `brief` only the progress of members is read, without the details (CastDetails).
        """
        ...

    async def put_live(self, record: LiveRecord, ttl_s: float) -> None:
        """Publish for `ttl_s` how a function version serves while it loads.

        A record older than the known one (LiveRecord.order) is ignored; publishing it again renews it.
        """
        ...

    async def put_scaling_record(self, record: ScalingRecord) -> None:
        """Keep the last scaling decision of a function, in place of the one before."""
        ...

    async def scaling_record(self, function: str) -> ScalingRecord | None:
        """Return the last scaling decision of a function, None without one."""
        ...

    async def acquire_lease(
        self, name: str, holder: str, ttl_s: float, *, beyond: Fence = NO_FENCE
    ) -> Fence | None:
        """Acquire or renew a lease; return its fence (greater after each change of holder), None if taken.

        `beyond` is the greatest fence of this lease that the caller has seen. If the state is older than
        that, it was restored, emptied or failed over: the fence is then one of a new incarnation.
        """
        ...

    async def release_lease(self, name: str, holder: str) -> None: ...

    async def snapshot(self) -> Snapshot: ...

    def watch(self, cursor: str) -> AsyncIterator[tuple[str, Change]]:
        """Yield changes after `cursor`, each with its own cursor, as they happen; never ends by itself.

        Raises NotFound when the feed no longer reaches back to `cursor`: take a new snapshot.
        """
        ...


class KeyState(Protocol):
    """API keys."""

    async def put_key(self, key: ApiKey) -> None: ...

    async def key(self, key_id: str) -> ApiKey: ...

    async def keys(self) -> list[ApiKey]: ...

    async def replace_key(self, before: ApiKey, after: ApiKey) -> None:
        """Replace the record `before` by `after`.

        Raises NotFound, and Conflict if the record was changed concurrently.
        """
        ...


class AuditLog(Protocol):
    """The audit log of changes: append-only, idempotent by id, bounded by removal of the oldest entries."""

    async def add_audit_entry(self, entry: AuditEntry, *, log: AuditLogName = AuditLogName.CHANGES) -> None:
        """Add an entry; one of a known id is ignored."""
        ...

    async def end_audit_entry(
        self, entry_id: str, outcome: AuditOutcome, *, log: AuditLogName = AuditLogName.CHANGES
    ) -> None:
        """Set the outcome of an entry that has none; ignored where it has one or was removed."""
        ...

    async def audit_page(self, query: AuditQuery = CHANGES) -> AuditPage:
        """Return the records that match, the latest first.

        Raises InvalidRecord for a cursor that no page had.
        """
        ...


class QuotaState(Protocol):
    """Rate limits, concurrency limits and spend limits of keys, counted for the whole cluster.

    Time is that of Redis, so that the gateways' clocks do not matter; but spending is counted by the UTC days
    and months of the records, and `now` (Unix seconds) selects the period.
    """

    async def admit(self, key: ApiKey, lease_id: str, *, ttl_s: float, now: float) -> RateLimitDecision:
        """Check one request against the key's limits and, unless it is refused, count it, atomically.

        An admitted request holds a concurrency lease of the key (`lease_id` is unique among all requests)
        until that is released or not renewed for `ttl_s`. A refused request counts nowhere. A repetition
        with the same `lease_id` is admitted again and counted once.
        """
        ...

    async def reserve(self, key: ApiKey, lease_id: str, nanos: int, *, now: float) -> bool:
        """Reserve an amount in the key's spend limit for as long as the lease is held.

        Returns False, and reserves nothing, if the amount spent in the period of `now` and the reservations
        of the key's other leases reach the limit. A repetition replaces the reservation.
        """
        ...

    async def renew_concurrency_leases(self, leases: Sequence[ConcurrencyLease], *, ttl_s: float) -> None:
        """Renew leases for `ttl_s`, expired ones too; must not be called for released ones."""
        ...

    async def release_concurrency_leases(self, leases: Sequence[ConcurrencyLease]) -> None:
        """Release leases; one that is not held is ignored."""
        ...

    async def spent_nanos(self, key_id: str, period: SpendPeriod, now: float) -> int:
        """Return the ledger's cost of the key's requests that ended in the period of `now`."""
        ...


class Ledger(Protocol):
    """The usage ledger: append-only (except `void_request`), idempotent by id."""

    def add_request(self, record: RequestRecord) -> Awaitable[bool]:
        """Add the record, its sums and its key's spending and tokens, atomically.

        Returns False if the ledger has that request_id already.
        """
        ...

    async def void_request(self, record: RequestRecord) -> bool:
        """Turn exactly this record into a failed one without cost, and subtract its cost from the sums.

        Atomic; returns False if the ledger does not hold this record. It must not be called for a request
        that was reported to its client as successful.
        """
        ...

    async def request(self, request_id: str) -> RequestRecord: ...

    async def requests_by_client_id(self, client_request_id: str, *, limit: int = 100) -> list[RequestRecord]:
        """Return the last requests with this id of their client, in order of `ended_at`."""
        ...

    async def requests(
        self, where: UsageFilter, *, limit: int = 1000, cursor: str = ""
    ) -> tuple[list[RequestRecord], str]:
        """Return records in order of `ended_at`, and the cursor of the next page ("" at the end)."""
        ...

    def usage_chunks(self, where: UsageFilter) -> AsyncIterator[UsageChunk]:
        """Yield the matching records in chunks that can be added up. Raises InvalidRecord for too many."""
        ...

    async def requests_by_id(
        self, request_ids: Sequence[str], *, since: float | None = None, until: float | None = None
    ) -> list[RequestRecord]:
        """Return the records with these ids that exist, in no particular order.

        Records that did not end in `[since, until)` may be missing.
        """
        ...

    async def report(self, where: UsageFilter) -> list[UsageRow]:
        """Return sums by function and tenant, ordered by both."""
        ...

    async def add_interval(self, interval: InstanceInterval) -> bool:
        """Add an instance interval; its identity is (instance_id, state, from_at)."""
        ...

    async def intervals(
        self, *, since: float | None = None, until: float | None = None
    ) -> list[InstanceInterval]:
        """Return the intervals that overlap `[since, until)`, in order of `from_at`."""
        ...

    def interval_pages(
        self, *, since: float | None = None, until: float | None = None
    ) -> AsyncIterator[list[InstanceInterval]]:
        """Yield pages in order of `to_at` that contain all of these intervals, and possibly others."""
        ...

    async def add_lost_call(self, lost: LostCall) -> bool:
        """Add the usage of a call that its gateway may not know; return False if that id exists already."""
        ...

    async def lost_calls(self, *, since: float | None = None, until: float | None = None) -> list[LostCall]:
        """Return the lost calls that ended in `[since, until)`, in order of `ended_at`."""
        ...

    def lost_call_pages(
        self, *, since: float | None = None, until: float | None = None
    ) -> AsyncIterator[list[LostCall]]:
        """Yield the same in pages."""
        ...

    async def rates(self) -> list[PriceRate]: ...

    async def put_rate(self, rate: PriceRate) -> None:
        """Store a rate; rates are immutable. Raises Conflict for a changed rate of a known id."""
        ...


class JobState(Protocol):
    """The queue of jobs, and their results for a time. Tenants take turns; leases are by the state's clock.

    What names an attempt (JobLease) is refused, with False, once that has lost its job.
    """

    async def submit_job(self, spec: JobSpec, body: bytes, bounds: JobBounds) -> Submission:
        """Queue a new job; with an id that exists nothing changes."""
        ...

    async def job(self, job_id: str) -> Job:
        """Return a job that has not been removed. Raises NotFound."""
        ...

    async def predictions(
        self, tenant: str, *, limit: int, after: str | None = None
    ) -> tuple[list[Job], bool]:
        """Return a tenant's jobs that are no lines of batches, the latest first, and whether there are more.

        They begin after the one with the id `after`. They are without `body`, and without `result` unless
        they failed. Raises NotFound if `after` is none of them.
        """
        ...

    async def job_counts(self) -> JobCounts:
        """Return how many jobs and batches there are."""
        ...

    async def claim_jobs(self, limit: int, *, ttl_s: float, without: Sequence[str] = ()) -> JobClaims:
        """Claim jobs for `ttl_s`, none of the tenants `without`.

        First the jobs of leases that have expired return to their queues, and results of which the time is
        over are removed.
        """
        ...

    async def renew_jobs(self, leases: Sequence[JobLease], *, ttl_s: float) -> LeaseRenewal: ...

    async def requeue_job(self, lease: JobLease, *, delay_s: float = 0.0) -> bool:
        """Return a running job to its queue, to be run again after a delay."""
        ...

    async def finish_job(
        self,
        lease: JobLease,
        outcome: JobOutcome,
        result: bytes,
        *,
        keep_s: float,
        bill: RequestRecord | None = None,
    ) -> bool:
        """Store how a running job ended, kept for `keep_s`. With a `bill` it ends once that is settled."""
        ...

    async def settle_job(self, lease: JobLease, *, keep_s: float) -> bool:
        """End a job of which the ledger has the bill."""
        ...

    async def cancel_job(self, job_id: str, outcome: JobOutcome, result: bytes, *, keep_s: float) -> Job:
        """End a job that waits, with this outcome, and mark one that runs; return it. Raises NotFound."""
        ...

    async def claim_hooks(self, limit: int, *, ttl_s: float, without: Sequence[str] = ()) -> HookClaims:
        """Claim webhooks that are due for `ttl_s`, none of the tenants `without`; then they are due again.

        Webhooks are those of jobs and of batches that have ended.
        """
        ...

    async def end_hook(
        self, subject_id: str, attempt: int, status: HookStatus, *, retry_in_s: float = 0.0
    ) -> bool:
        """Record how a try of a webhook ended; one that is `waiting` is due again after `retry_in_s`."""
        ...

    def watch_jobs(self) -> AsyncIterator[Sequence[JobEvent]]:
        """Yield an empty sequence once it watches, then events as they happen; never ends by itself.

        Events may be lost while a watcher is far behind: it finds what it missed in the jobs.
        """
        ...


class FileState(Protocol):
    """The files of tenants, and batches."""

    async def put_file(self, record: FileRecord, *, files: int, file_bytes: int) -> Submission:
        """Add a file, unless it would exceed these bounds; one tenant gets half."""
        ...

    async def file(self, file_id: str) -> FileRecord: ...

    async def files(self, tenant: str) -> list[FileRecord]:
        """Return the files of a tenant, the latest first."""
        ...

    async def delete_file(self, file_id: str) -> None:
        """Remove a file; do nothing if there is none."""
        ...

    async def file_digests(self) -> frozenset[str]:
        """Return the digests of the parts of all files, and of the results of open batches."""
        ...

    async def sweep_files(self, now: float) -> int:
        """Remove files and batches of which the time is over at `now` (Unix seconds); return how many."""
        ...

    async def put_batch(self, record: BatchRecord, *, batches: int) -> Submission:
        """Add a batch, unless there would be more; one tenant gets half."""
        ...

    async def batch(self, batch_id: str) -> tuple[BatchRecord, BatchCounts]: ...

    async def batches(self, tenant: str) -> list[tuple[BatchRecord, BatchCounts]]:
        """Return the batches of a tenant, the latest first."""
        ...

    async def open_batches(self) -> list[str]:
        """Return the ids of the batches that have not ended."""
        ...

    async def batch_lines(self, batch_id: str) -> list[str]:
        """Return the ids of the jobs of its lines that have not ended."""
        ...

    async def batch_results(self, batch_id: str, limit: int) -> list[LineResult]:
        """Return the first results of lines that wait to be written to a file."""
        ...

    async def replace_batch(
        self,
        before: BatchRecord,
        after: BatchRecord,
        *,
        lines: Sequence[tuple[JobSpec, bytes]] = (),
        taken: int = 0,
        files: Sequence[FileRecord] = (),
        keep_s: float = 0.0,
        bounds: JobBounds | None = None,
    ) -> Submission:
        """Replace a batch, queue `lines`, drop the first `taken` results and add `files`, atomically.

        EXISTS: the batch is not `before` any more. FULL, TENANT_FULL: there is no room for the lines. Nothing
        has changed then. One that has ended is kept for `keep_s`.
        """
        ...


class State(ClusterState, KeyState, AuditLog, QuotaState, Ledger, JobState, FileState, Protocol):
    """The whole shared state, over one connection pool."""

    async def ping(self) -> None:
        """Return if writes are accepted; raises StateFull if there is no memory left for them."""
        ...

    async def aclose(self) -> None: ...
