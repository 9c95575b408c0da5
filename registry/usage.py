"""Usage records: what a request used and what an instance occupied. Immutable once written."""

from dataclasses import dataclass
from enum import StrEnum


class RequestStatus(StrEnum):
    OK = "ok"
    CANCELLED = "cancelled"  # the client left
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. Times `*_at` are Unix seconds; `*_ms` are integers, rounded up once.

    `cost_nanos` is in billionths of the price table's currency unit; `rate_id` names the rate that
    was in force, frozen in the record.
    """

    request_id: str
    tenant: str
    key_id: str
    function: str
    version: int
    status: RequestStatus
    start_kind: str
    node: str
    gpu_type: str
    gpu_count: int
    received_at: float
    started_at: float
    ended_at: float
    queue_ms: int
    load_ms: int
    exec_ms: int
    billed_gpu_ms: int
    prompt_tokens: int
    completion_tokens: int
    rate_id: str
    cost_nanos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceInterval:
    """One interval `[from_at, to_at)` that an instance spent in a state (Unix seconds)."""

    instance_id: str
    function: str
    version: int
    node: str
    state: str
    from_at: float
    to_at: float
    gpu_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A price: billionths of the currency unit, per GPU-second, per request and per million tokens."""

    id: str
    gpu_type: str
    gpu_second_nanos: int
    request_nanos: int
    prompt_mtoken_nanos: int
    completion_mtoken_nanos: int
    currency: str = "USD"


def cost_nanos(rate: Rate, billed_gpu_ms: int, prompt_tokens: int, completion_tokens: int) -> int:
    """The integer price of one request: each part is rounded up once, after multiplication."""
    return (
        rate.request_nanos
        + -(-rate.gpu_second_nanos * billed_gpu_ms // 1000)
        + -(-rate.prompt_mtoken_nanos * prompt_tokens // 1_000_000)
        + -(-rate.completion_mtoken_nanos * completion_tokens // 1_000_000)
    )
