"""The shared state in one process: the fake of RedisState, which passes the same contract suite."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from registry.clock import Clock, SystemClock
from registry.errors import Conflict, NotFound, StaleEpoch
from registry.keys import FEED_LENGTH
from registry.memory.audit import MemoryAudit
from registry.memory.casts import MemoryCasts
from registry.memory.jobs import MemoryJobs
from registry.memory.ledger import MemoryLedger
from registry.memory.quota import MemoryQuotas
from registry.records.api_key import ApiKey, SpendPeriod
from registry.records.cast import CastProgress, CastRecord, CastStatus
from registry.records.change import (
    SCALE_REQUEST_S,
    CastChanged,
    CastPartEnded,
    Change,
    FunctionChanged,
    FunctionDeleted,
    InstanceChanged,
    LiveChanged,
    LoadReport,
    NodeGone,
    NodeUp,
    ScaleRequested,
    ScaleTarget,
    Snapshot,
    VersionLoad,
)
from registry.records.fence import NO_FENCE, Fence
from registry.records.function import Access, Function, FunctionVersion, Scaling
from registry.records.function_changes import (
    AccessStep,
    KnownFunction,
    keep_access,
    no_function,
    no_version,
    plan_current,
    plan_version,
    reserved,
)
from registry.records.instance import TRANSITIONS, InstanceRecord
from registry.records.live import LiveRecord
from registry.records.node import NodeRecord
from registry.records.quota import ConcurrencyLease, RateLimitDecision
from registry.records.rollout_changes import RolloutStep
from registry.records.scaling import ScalingRecord
from registry.records.secret import FunctionSecrets
from registry.records.usage import RequestRecord
from registry.state import ClusterConfig, State


class MemoryFeed:
    """The latest changes, numbered; entry 0 is empty, so that the first cursor names an entry."""

    def __init__(self, length: int) -> None:
        self._entries: deque[Change | None] = deque([None], maxlen=length)
        self._last = 0
        self._grown = asyncio.Event()

    @property
    def cursor(self) -> str:
        return str(self._last)

    def publish(self, change: Change) -> None:
        """Append a change and wake all watchers."""
        self._entries.append(change)
        self._last += 1
        self._grown.set()
        self._grown = asyncio.Event()

    async def watch(self, cursor: str) -> AsyncIterator[tuple[str, Change]]:
        """Yield the changes after `cursor`, for ever. Raises NotFound if it has been trimmed."""
        position = int(cursor) if cursor.isdecimal() else -1
        while True:
            first = self._last - len(self._entries) + 1
            if not first <= position <= self._last:
                raise NotFound(f"the feed has been trimmed beyond cursor {cursor}")
            if position == self._last:
                await self._grown.wait()
                continue
            for change in list(islice(self._entries, position - first + 1, None)):
                position += 1
                if change is not None:
                    yield str(position), change


@dataclass(slots=True)
class _StoredNode:
    """A node; `record` is None before its first heartbeat and after its removal.

    `instances_epoch` is the epoch that `instances` belong to, 0 if there are none.
    """

    epoch: int = 0
    record: NodeRecord | None = None
    expires_at: float = 0.0
    instances: dict[str, InstanceRecord] = field(default_factory=dict)
    instances_epoch: int = 0

    def clear_instances(self) -> None:
        self.instances.clear()
        self.instances_epoch = 0


@dataclass(frozen=True, slots=True)
class _Lease:
    holder: str
    epoch: int
    expires_at: float


class MemoryState(MemoryLedger, MemoryAudit, MemoryJobs, State):
    """The shared state; time comes from `clock`, so that tests with a FakeClock control expiry."""

    def __init__(self, *, clock: Clock | None = None, feed_length: int = FEED_LENGTH) -> None:
        MemoryLedger.__init__(self)
        MemoryAudit.__init__(self)
        self._clock = clock or SystemClock()
        MemoryJobs.__init__(self, self._clock)
        self._feed = MemoryFeed(feed_length)
        self._config: ClusterConfig | None = None
        self._heads: dict[str, Function] = {}
        self._versions: dict[tuple[str, int], FunctionVersion] = {}
        self._last_versions: dict[str, int] = {}
        self._nodes: dict[str, _StoredNode] = {}
        self._load_reports: dict[str, tuple[LoadReport, float]] = {}
        self._scale_tokens: set[str] = set()
        self._scale_requests: dict[str, tuple[ScaleRequested, float]] = {}
        self._leases: dict[str, _Lease] = {}
        self._incarnation = ""
        self._keys: dict[str, ApiKey] = {}
        self._secrets: dict[str, FunctionSecrets] = {}
        self._quotas = MemoryQuotas(self._clock)
        self._casts = MemoryCasts(self._clock)
        self._scaling: dict[str, ScalingRecord] = {}
        self._lives: dict[tuple[str, int], tuple[LiveChanged, float]] = {}

    async def cluster_config(self, default: ClusterConfig | None = None) -> ClusterConfig:
        self._config = self._config or default
        if self._config is None:
            raise NotFound("the cluster has no configuration yet: start a gateway first")
        if default is not None:
            self._raise_schema(default.schema)
        return self._config.check_readable()

    async def create_version(
        self,
        draft: FunctionVersion,
        scaling: Scaling | None,
        access: AccessStep = keep_access,
        *,
        unreserved: bool = False,
        becomes_current: bool = True,
    ) -> FunctionVersion:
        name = draft.function
        head = self._heads.get(name)
        current = self._versions[name, head.current] if head else None
        known = KnownFunction(head=head, current=current, last=self._last_versions.get(name, 0))
        planned = plan_version(known, draft, scaling, access, becomes_current=becomes_current)
        if unreserved and head is None and name in self._secrets:
            raise reserved(name)
        self._raise_schema(planned.result.schema)
        if planned.is_new:
            self._versions[name, planned.result.version] = planned.result
            self._last_versions[name] = planned.result.version
        if planned.head != head:
            self._set_head(planned.head, planned.result)
        return planned.result

    async def function(self, name: str) -> Function:
        if name not in self._heads:
            raise no_function(name)
        return self._heads[name]

    async def functions(self) -> list[Function]:
        return [self._heads[name] for name in sorted(self._heads)]

    async def version(self, name: str, version: int | None = None) -> FunctionVersion:
        number = (await self.function(name)).current if version is None else version
        await self.function(name)
        if (name, number) not in self._versions:
            raise no_version(name, number)
        return self._versions[name, number]

    async def versions(self, name: str | None = None) -> list[FunctionVersion]:
        if name is not None:
            await self.function(name)
        return [version for (owner, _), version in sorted(self._versions.items()) if name in (None, owner)]

    async def set_current(self, name: str, version: int, *, at: float = 0.0) -> Function:
        head = await self.function(name)
        return self._update(head, plan_current(head, version, at=at))

    async def set_scaling(self, name: str, scaling: Scaling) -> Function:
        head = await self.function(name)
        return self._update(head, replace(head, scaling=scaling))

    async def set_access(self, name: str, step: Callable[[Access], Access]) -> Function:
        head = await self.function(name)
        return self._update(head, replace(head, access=step(head.access)))

    async def change_rollout(self, name: str, step: RolloutStep) -> Function:
        head = await self.function(name)
        return self._update(head, step(head))

    async def delete_function(self, name: str) -> None:
        head = await self.function(name)
        del self._heads[name]
        for number in head.versions:
            del self._versions[name, number]
        self._secrets.pop(name, None)
        self._feed.publish(FunctionDeleted(name=name))

    async def next_node_epoch(self, node: str) -> int:
        known = self._nodes.setdefault(node, _StoredNode())
        known.epoch += 1
        return known.epoch

    async def put_node(self, record: NodeRecord, ttl_s: float) -> bool:
        node = self._fenced(record.id, record.epoch)
        former = self._unexpired(node)
        if former is not None and former.epoch != record.epoch:
            self._feed.publish(NodeGone(id=record.id, epoch=former.epoch))
        known = node.instances_epoch == record.epoch
        if not known:
            node.clear_instances()
            node.instances_epoch = record.epoch
        node.record, node.expires_at = record, self._clock.monotonic_s() + ttl_s
        self._feed.publish(NodeUp(record=record, ttl_s=ttl_s))
        if former is None or former.epoch != record.epoch:
            for instance in node.instances.values():
                self._feed.publish(InstanceChanged(record=instance))
        return known

    async def remove_node(self, node: str, epoch: int) -> None:
        known = self._nodes.get(node)
        if known is None or epoch < known.epoch:
            return
        if self._unexpired(known) is not None or known.instances_epoch:
            self._feed.publish(NodeGone(id=node, epoch=epoch))
        known.record = None
        known.clear_instances()

    async def put_instance(self, record: InstanceRecord, node_epoch: int) -> None:
        node = self._fenced(record.node, node_epoch)
        if node.instances_epoch != node_epoch:
            node.clear_instances()
            node.instances_epoch = node_epoch
        if TRANSITIONS[record.state]:
            node.instances[record.instance_id] = record
        else:
            node.instances.pop(record.instance_id, None)
        self._feed.publish(InstanceChanged(record=record))

    async def put_load_report(self, gateway: str, loads: Sequence[VersionLoad], ttl_s: float) -> None:
        change = LoadReport(gateway=gateway, loads=tuple(loads), ttl_s=ttl_s)
        self._load_reports[gateway] = change, self._clock.monotonic_s() + ttl_s
        self._feed.publish(change)

    async def request_scale(self, target: ScaleTarget, ttl_s: float = SCALE_REQUEST_S) -> None:
        if target.token in self._scale_tokens:
            return
        self._scale_tokens.add(target.token)
        change = ScaleRequested(target=target, ttl_s=ttl_s)
        self._scale_requests[target.function] = change, self._clock.monotonic_s() + ttl_s
        self._feed.publish(change)

    async def put_cast(self, record: CastRecord) -> None:
        if self._casts.put(record):
            self._feed.publish(CastChanged(record=record))

    async def put_cast_progress(self, progress: CastProgress) -> None:
        if self._casts.put_progress(progress) and progress.is_final:
            self._feed.publish(CastPartEnded(progress=progress))

    async def casts(
        self, prefix: str = "", *, function: str | None = None, brief: bool = False
    ) -> list[CastStatus]:
        return self._casts.find(prefix, function, brief=brief)

    async def put_live(self, record: LiveRecord, ttl_s: float) -> None:
        key, now = (record.function, record.version), self._clock.monotonic_s()
        known, expires_at = self._lives.get(key, (None, now))
        if known is not None and expires_at > now and record.order < known.record.order:
            return
        change = LiveChanged(record=record, ttl_s=ttl_s)
        self._lives[key] = change, now + ttl_s
        self._feed.publish(change)

    async def put_scaling_record(self, record: ScalingRecord) -> None:
        self._scaling[record.function] = record

    async def scaling_record(self, function: str) -> ScalingRecord | None:
        return self._scaling.get(function)

    async def acquire_lease(
        self, name: str, holder: str, ttl_s: float, *, beyond: Fence = NO_FENCE
    ) -> Fence | None:
        now = self._clock.monotonic_s()
        lease = self._leases.get(name, _Lease("", 0, 0.0))
        free, epoch = lease.expires_at <= now, lease.epoch
        if not free and lease.holder != holder:
            return None
        if not self._incarnation or Fence(self._incarnation, epoch) < beyond:
            self._incarnation = beyond.next_incarnation(self._clock.wall_s())
            free, epoch = True, max(epoch, beyond.epoch)
        self._leases[name] = _Lease(holder, epoch + free, now + ttl_s)
        return Fence(self._incarnation, epoch + free)

    async def release_lease(self, name: str, holder: str) -> None:
        lease = self._leases.get(name)
        if lease is not None and lease.holder == holder:
            self._leases[name] = replace(lease, expires_at=0.0)

    async def snapshot(self) -> Snapshot:
        now = self._clock.monotonic_s()
        nodes = [node for _, node in sorted(self._nodes.items()) if self._unexpired(node) is not None]
        instances = [
            instance
            for node in nodes
            if node.record is not None and node.instances_epoch == node.record.epoch
            for instance in node.instances.values()
        ]
        return Snapshot(
            cursor=self._feed.cursor,
            functions=tuple(await self.functions()),
            versions=tuple(await self.versions()),
            nodes=tuple(
                NodeUp(record=node.record, ttl_s=node.expires_at - now)
                for node in nodes
                if node.record is not None
            ),
            instances=tuple(sorted(instances, key=lambda record: record.instance_id)),
            load_reports=tuple(
                replace(change, ttl_s=expires_at - now)
                for _, (change, expires_at) in sorted(self._load_reports.items())
                if expires_at > now
            ),
            casts=tuple(self._casts.records()),
            live=tuple(
                replace(change, ttl_s=expires_at - now)
                for _, (change, expires_at) in sorted(self._lives.items())
                if expires_at > now
            ),
            scale_requests=tuple(
                replace(change, ttl_s=expires_at - now)
                for _, (change, expires_at) in sorted(self._scale_requests.items())
                if expires_at > now
            ),
        )

    def watch(self, cursor: str) -> AsyncIterator[tuple[str, Change]]:
        return self._feed.watch(cursor)

    async def function_secrets(self, function: str) -> FunctionSecrets:
        return self._secrets.get(function, FunctionSecrets(function=function))

    async def functions_with_secrets(self) -> list[str]:
        return sorted(self._secrets)

    async def replace_secrets(self, before: FunctionSecrets, after: FunctionSecrets) -> bool:
        if await self.function_secrets(before.function) != before:
            return False
        self._secrets[after.function] = after
        if not after.secrets:
            del self._secrets[after.function]
        return True

    async def put_key(self, key: ApiKey) -> None:
        self._raise_schema(key.schema)
        self._keys[key.id] = key

    async def key(self, key_id: str) -> ApiKey:
        if key_id not in self._keys:
            raise NotFound(f"no key {key_id}")
        return self._keys[key_id]

    async def keys(self) -> list[ApiKey]:
        return sorted(self._keys.values(), key=lambda key: (key.created_at, key.id))

    async def replace_key(self, before: ApiKey, after: ApiKey) -> None:
        if await self.key(before.id) not in (before, after):
            raise Conflict(f"the key {before.id} was changed concurrently")
        self._keys[before.id] = after
        if after.tokens_per_minute is None:
            self._quotas.clear_tokens(after.id)

    async def admit(self, key: ApiKey, lease_id: str, *, ttl_s: float, now: float) -> RateLimitDecision:
        return self._quotas.admit(key, lease_id, ttl_s=ttl_s, now=now)

    async def reserve(self, key: ApiKey, lease_id: str, nanos: int, *, now: float) -> bool:
        return self._quotas.reserve(key, lease_id, nanos, now=now)

    async def renew_concurrency_leases(self, leases: Sequence[ConcurrencyLease], *, ttl_s: float) -> None:
        self._quotas.renew(leases, ttl_s=ttl_s)

    async def release_concurrency_leases(self, leases: Sequence[ConcurrencyLease]) -> None:
        self._quotas.release(leases)

    async def spent_nanos(self, key_id: str, period: SpendPeriod, now: float) -> int:
        return self._quotas.spent_nanos(key_id, period, now)

    async def add_request(self, record: RequestRecord) -> bool:
        added = await super().add_request(record)
        if added:
            self._quotas.charge(record)
        return added

    async def void_request(self, record: RequestRecord) -> bool:
        done = await super().void_request(record)
        if done:
            self._quotas.refund(record)
        return done

    async def ping(self) -> None:
        return None

    async def aclose(self) -> None:
        return None

    def _update(self, old: Function, new: Function) -> Function:
        if new != old:
            self._set_head(new)
        return new

    def _raise_schema(self, schema: int) -> None:
        if self._config is not None and self._config.schema < schema:
            self._config = replace(self._config, schema=schema)

    def _set_head(self, head: Function, version: FunctionVersion | None = None) -> None:
        self._raise_schema(head.schema)
        self._heads[head.name] = head
        version = version or self._versions[head.name, head.current]
        self._feed.publish(FunctionChanged(function=head, version=version))

    def _fenced(self, node: str, epoch: int) -> _StoredNode:
        known = self._nodes.setdefault(node, _StoredNode())
        if epoch < known.epoch:
            raise StaleEpoch(f"node {node} has a later epoch than {epoch}")
        known.epoch = epoch
        return known

    def _unexpired(self, node: _StoredNode) -> NodeRecord | None:
        return node.record if node.expires_at > self._clock.monotonic_s() else None
