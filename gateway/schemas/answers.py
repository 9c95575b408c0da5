"""Shapes of good answers, for the description in /openapi.json: the code that answers builds them itself."""

import dataclasses
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from gateway.schemas_openai import Object, Usage
from registry.api_key import ApiKey
from registry.conservation import NodeBalance, Verdict
from registry.function import FunctionVersion, Scaling
from registry.instance import InstanceRecord
from registry.live import LiveRecord
from registry.node import NodeRecord
from registry.usage import Rate
from registry.usage_groups import SummaryRow

Count = Annotated[int, Meta(ge=0)]


def _like(kind: type, name: str, *, without: str = "", extra: list[tuple[str, Any]] | None = None) -> type:
    """A struct with the fields of a record, less one, and further ones."""
    hints = get_type_hints(kind, include_extras=True)
    kept = [field.name for field in dataclasses.fields(kind) if field.name != without]
    fields = [(field, hints[field]) for field in kept] + (extra or [])
    return msgspec.defstruct(name, fields, frozen=True, kw_only=True)


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: Count
    text: str
    logprobs: Object | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] = []


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Streams carry the same object in chunks."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


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


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Streams carry chunks, with `delta` in the place of `message`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """`embedding` is a list of numbers, or base64 of little-endian float32."""

    index: Count
    embedding: list[float] | str
    object: Literal["embedding"]


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[Embedding]
    model: str
    usage: Usage
    object: Literal["list"]


class FunctionShown(msgspec.Struct, frozen=True, kw_only=True):
    """`live` is the last decision whether the current version serves while it loads, and its pipelines."""

    name: str
    current: FunctionVersion
    versions: list[int]
    scaling: Scaling
    created_at: float
    instances: list[InstanceRecord]
    live: LiveRecord | None = None
    history: list[FunctionVersion] = []


class FunctionList(msgspec.Struct, frozen=True, kw_only=True):
    functions: list[FunctionShown]


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """`collected` blobs went with the function."""

    name: str
    collected: Count


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    instances: Count
    waited: bool


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tier: Literal["gpu", "host"]


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
    instances: list[InstanceRecord]


Node = _like(NodeRecord, "Node", extra=[("tiers", dict[str, list[str]]), ("instances", list[InstanceRecord])])
NodeList = msgspec.defstruct("NodeList", [("nodes", list[Node])])  # type: ignore[valid-type]
Key = _like(ApiKey, "Key", without="digest", extra=[("spent_nanos", int | None)])
NewKey = _like(ApiKey, "NewKey", without="digest", extra=[("key", str)])
KeyList = msgspec.defstruct("KeyList", [("keys", list[Key])])  # type: ignore[valid-type]


class RateList(msgspec.Struct, frozen=True, kw_only=True):
    rates: list[Rate]


class UsageSums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over requests; with them stand the properties that were asked for `by`."""

    requests: Count
    prompt_tokens: Count
    completion_tokens: Count
    billed_gpu_ms: Count
    cost_nanos: int
    function: str | None = None
    tenant: str | None = None
    key: str | None = None
    node: str | None = None
    version: int | None = None
    status: str | None = None
    start_kind: str | None = None
    hour: str | None = None
    day: str | None = None


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[UsageSums]


class UsageSummary(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[SummaryRow]


class GpuTimeRow(msgspec.Struct, frozen=True, kw_only=True, rename={"from_at": "from", "to_at": "to"}):
    """`function`, `tenant` and `node` where they were asked for; loading and idle time has no tenant."""

    from_at: float
    to_at: float
    allocated_ms: Count
    attributed_ms: Count
    loading_ms: Count
    idle_ms: Count
    lost_ms: Count
    function: str | None = None
    tenant: str | None = None
    node: str | None = None


class GpuTimeReport(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[GpuTimeRow]


class InstanceChecked(msgspec.Struct, frozen=True, kw_only=True):
    instance_id: str
    node: str
    busy_us: Count
    used_us: Count
    lost_us: Count
    missing_us: int
    verdict: Verdict
    why: str


class UsageCheck(msgspec.Struct, frozen=True, kw_only=True):
    """`instances` and `nodes` are those that do not add up exactly."""

    verdict: Verdict
    requests: Count
    instances_checked: Count
    nodes_checked: Count
    instances: list[InstanceChecked]
    nodes: list[NodeBalance]


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["alive"]


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ready", "not ready"]
    reasons: list[str] = []


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ready", "not ready"]
    reasons: list[str]
    phase: str
    in_flight: Count
    state: Literal["alive", "silent"]
    nodes: Count
    functions: Count
    instances: dict[str, int]
    ready_instances: Count
