"""Response bodies."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from gateway.schemas.openai import Object, UsageInfo
from registry.accounting.reconciliation import BalanceVerdict, NodeBalance
from registry.accounting.usage_groups import SummaryRow
from registry.exports.charges import Meter
from registry.records.api_key import ApiKey, KeyRole, SpendPeriod
from registry.records.audit import AuditEntry
from registry.records.function import FunctionVersion, Scaling
from registry.records.instance import InstanceRecord
from registry.records.live import LiveRecord
from registry.records.node import NodeRecord
from registry.records.rollout import Rollout, RolloutLimits, RolloutState
from registry.records.scaling import ScalingRecord
from registry.records.usage import PriceRate

VERSION = "0.1.0"
Count = Annotated[int, Meta(ge=0)]
S = TypeVar("S", bound=msgspec.Struct)


def _like(
    kind: type, name: str, *, without: str = "", extra: list[tuple[str, Any]] | None = None
) -> type[msgspec.Struct]:
    """Return a struct type with the fields of a record, without one of them, and with `extra` ones."""
    hints = get_type_hints(kind, include_extras=True)
    kept = [field.name for field in dataclasses.fields(kind) if field.name != without]
    fields = [(field, hints[field]) for field in kept] + (extra or [])
    return msgspec.defstruct(name, fields, frozen=True, kw_only=True)


def view(kind: type[S], record: object, **extra: object) -> S:
    """Return `record` as a struct made by `_like`, with its `extra` fields."""
    fields = {name: getattr(record, name) for name in kind.__struct_fields__ if name not in extra}
    return kind(**fields, **extra)


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: Count
    text: str
    logprobs: Object | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] = []


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of /v1/completions. Streams have the same object in chunks."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: Count
    message: AnswerMessage
    logprobs: Object | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] = []


class ChatCompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The response of /v1/chat/completions. Streams have chunks with `delta` instead of `message`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """`embedding` is a list of numbers, or base64 of little-endian float32."""

    index: Count
    embedding: list[float] | str
    object: Literal["embedding"]


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[Embedding]
    model: str
    usage: UsageInfo
    object: Literal["list"]


class RolloutTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What a version has served over a rollout's window; `ttft_ms` is the mean, null without first tokens."""

    version: Count
    requests: Count
    ended: Count
    errors: Count
    ttft_ms: float | None


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """The last rollout of a function. Of one in progress, `traffic` is what is compared: candidate, stable.

    `ready` counts the candidate's instances. `since` is when the state or the share last changed.
    """

    name: str
    id: str
    state: RolloutState
    candidate: Count
    stable: Count
    percent: float
    shadow_percent: float
    steps: Sequence[float]
    step_s: float
    limits: RolloutLimits
    started_at: float
    since: float
    reason: str
    ready: Count
    traffic: Sequence[RolloutTraffic]


class FunctionView(msgspec.Struct, frozen=True, kw_only=True):
    """A function. `live` is the last decision on serving while loading; `history` are all versions.

    `decision` is the last one that changed the number of instances; lists of functions do not have it.
    `rollout` is the last one.

    `owner` is a tenant, null for the operator. Keys that may call a function and not manage it are not shown
    its files, instances and the tenants that it is shared with.
    """

    name: str
    current: FunctionVersion
    versions: Sequence[int]
    scaling: Scaling
    created_at: float
    instances: Sequence[InstanceRecord]
    owner: str | None
    visibility: Literal["public", "private"]
    shared_with: Sequence[str]
    live: LiveRecord | None = None
    decision: ScalingRecord | msgspec.UnsetType | None = msgspec.UNSET
    rollout: Rollout | None = None
    history: Sequence[FunctionVersion] | msgspec.UnsetType = msgspec.UNSET


class FunctionList(msgspec.Struct, frozen=True, kw_only=True):
    functions: list[FunctionView]


class DeletedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A deleted function, with the number of blobs that were deleted with it."""

    name: str
    collected: Count


class SecretView(msgspec.Struct, frozen=True, kw_only=True):
    """A secret without its value."""

    key: str
    bytes: Count
    set_at: float


class SecretList(msgspec.Struct, frozen=True, kw_only=True):
    secrets: list[SecretView]


class ReencryptedSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """Secrets as `function/key`; `unreadable` were encrypted with a cluster secret that is not known here."""

    reencrypted: Sequence[str]
    unreadable: Sequence[str]


class ScaledFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    instances: Count
    waited: bool


class CordonedNode(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    cordoned: bool


class DrainedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A cordoned node with the instances that it still has."""

    node: str
    instances: Sequence[InstanceRecord]


class DroppedImage(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tier: Literal["gpu", "host", "disk"]


class BlobStatus(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    offset: Count
    size: int | None
    complete: bool


class BlobProgress(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    offset: Count
    complete: bool


class InstanceList(msgspec.Struct, frozen=True, kw_only=True):
    instances: Sequence[InstanceRecord]


NodeView = _like(
    NodeRecord, "NodeView", extra=[("tiers", dict[str, list[str]]), ("instances", list[InstanceRecord])]
)
NodeList = msgspec.defstruct("NodeList", [("nodes", list[NodeView])])  # type: ignore[valid-type]
KeyView = _like(ApiKey, "KeyView", without="digest", extra=[("spent_nanos", int | None)])
NewKey = _like(ApiKey, "NewKey", without="digest", extra=[("key", str)])
AuditView = _like(
    AuditEntry,
    "AuditView",
    extra=[
        *(("status", int | None), ("code", str), ("made", str), ("ended_at", float | None)),
    ],
)
AuditAnswer = msgspec.defstruct(
    "AuditAnswer",
    [("entries", list[AuditView]), ("next", str)],  # type: ignore[valid-type]
)
RotatedKey = _like(ApiKey, "RotatedKey", without="digest", extra=[("key", str), ("former_expires_at", float)])
KeyList = msgspec.defstruct("KeyList", [("keys", list[KeyView])])  # type: ignore[valid-type]


class OwnKey(msgspec.Struct, frozen=True, kw_only=True):
    """The key of the request: who it is, what it may do, its limits and what is spent of them.

    `functions` are the only ones that it may call, none: any. `gateway` answers, of release `version`.
    """

    id: str
    tenant: str
    role: KeyRole
    name: str
    rights: Sequence[str]
    functions: Sequence[str]
    expires_at: float | None
    max_concurrent: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    spend_limit_nanos: int | None
    spend_period: SpendPeriod
    spent_nanos: int | None
    currency: str
    gateway: str
    version: str = VERSION


class RateList(msgspec.Struct, frozen=True, kw_only=True):
    rates: Sequence[PriceRate]


class UsageSums(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sums over requests, with the properties requested in `by`."""

    function: str | None = None
    tenant: str | None = None
    key: str | None = None
    node: str | None = None
    version: int | None = None
    status: str | None = None
    start_kind: str | None = None
    hour: str | None = None
    day: str | None = None
    requests: Count
    prompt_tokens: Count
    completion_tokens: Count
    billed_gpu_ms: Count
    cost_nanos: int


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The sums; `cost_nanos` are in billionths of the unit of `currency`."""

    rows: Sequence[UsageSums]
    currency: str


class UsageSummary(msgspec.Struct, frozen=True, kw_only=True):
    rows: Sequence[SummaryRow]


class QuotePart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a price: `quantity` requests, tokens, or milliseconds of GPU time."""

    meter: Meter
    quantity: Count
    cost_nanos: Count


class Quote(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may cost, in billionths of the unit of `currency`.

    Tokens are those of the prompt, and the most that it may generate. GPU time is the longest of late for as
    much work (`measured`), or a guess where this gateway has served none yet (`assumed`). `rate` is the id of
    the price, null for a device that is free of charge.
    """

    object: Literal["quote"] = "quote"
    model: str
    version: int
    currency: str
    cost_nanos: Count
    cost: str
    rate: str | None
    gpu_type: str | None
    gpu_time: Literal["measured", "assumed"]
    parts: Sequence[QuotePart]


class ArchivedFile(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of the ledger of one day (UTC), as a Parquet file in the store, named by its SHA-256."""

    day: str
    kind: str
    rows: Count
    bytes: Count
    digest: str


class ArchiveList(msgspec.Struct, frozen=True, kw_only=True):
    files: Sequence[ArchivedFile]


class GpuTimeRow(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"from_at": "from", "to_at": "to"}
):
    """A row of GPU time; `function`, `tenant`, `node` as requested. Loading and idle time has no tenant.

    Used, loading and idle time add up to the allocated; `attributed_ms` is billed, rounded up per request.
    """

    from_at: float
    to_at: float
    function: str | None = None
    tenant: str | None = None
    node: str | None = None
    allocated_ms: Count
    used_ms: Count
    attributed_ms: Count
    loading_ms: Count
    idle_ms: Count
    lost_ms: Count


class GpuTimeReport(msgspec.Struct, frozen=True, kw_only=True):
    rows: Sequence[GpuTimeRow]


class InstanceAudit(msgspec.Struct, frozen=True, kw_only=True):
    instance_id: str
    node: str
    busy_us: Count
    used_us: Count
    lost_us: Count
    missing_us: int
    verdict: BalanceVerdict
    why: str


class UsageAudit(msgspec.Struct, frozen=True, kw_only=True):
    """The audit of the ledger; `instances` and `nodes` are those that do not balance exactly."""

    verdict: BalanceVerdict
    requests: Count
    instances_checked: Count
    nodes_checked: Count
    instances: Sequence[InstanceAudit]
    nodes: Sequence[NodeBalance]


class ServiceIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What the service is, and where to go on."""

    service: Literal["hypercast"] = "hypercast"
    version: str = VERSION
    openapi: Literal["/openapi.json"] = "/openapi.json"
    console: Literal["/ui"] = "/ui"
    livez: Literal["/livez"] = "/livez"
    health: Literal["/health"] = "/health"
    api: str = "OpenAI's and Anthropic's below /v1; send the API key as 'Authorization: Bearer hc_…'"
    docs: str = "docs/HTTP.md in the source; the command line: hypercast --help"


class Liveness(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["alive"] = "alive"


class Readiness(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    status: Literal["ready", "not ready"]
    reasons: Sequence[str] = ()


class HealthStatus(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ready", "not ready"]
    state: Literal["alive", "silent"]


class Health(HealthStatus, frozen=True, kw_only=True):
    reasons: Sequence[str]
    phase: str
    in_flight: Count
    state_reason: str
    nodes: Count
    functions: Count
    instances: dict[str, int]
    ready_instances: Count
    link_rate_bytes_s: int | msgspec.UnsetType = msgspec.UNSET
