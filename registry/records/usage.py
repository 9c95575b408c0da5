"""Usage records of requests and instances. Immutable once written."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec


class RequestStatus(StrEnum):
    """How a request ended."""

    OK = "ok"
    CANCELLED = "cancelled"  # the client or a deadline ended it; billed for what was delivered
    FAILED = "failed"


class GpuSlice(msgspec.Struct, frozen=True, kw_only=True):
    """The accelerator time that one call of a request used on one instance, in microseconds."""

    call_id: str
    instance_id: str
    node: str
    gpu_us: int


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times `*_at` are Unix seconds; `*_ms` are integers, rounded up once.

    `cost_nanos` is in billionths of the price table's currency unit; `rate_id` names the rate that
    was in force, frozen in the record. `gpu` has the time by instance: `billed_gpu_ms` is its sum,
    rounded up once. `request_id` is the gateway's own, unique; `client_request_id` is the client's
    `x-request-id` ("": none), which it may repeat.
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
    gpu: tuple[GpuSlice, ...] = ()
    client_request_id: str = ""

    @property
    def response_id(self) -> str:
        """The id in the response's `x-request-id` header."""
        return self.client_request_id or self.request_id


def voided(record: RequestRecord) -> RequestRecord:
    """Return the record as that of a failed request: with its usage, without cost."""
    return msgspec.structs.replace(record, status=RequestStatus.FAILED, cost_nanos=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPart:
    """A part `[from_us, to_us)` of the microseconds that a call uses on an instance.

    `over`: the last part, of which the ledger has all time already (as a slice or a LostCall).
    """

    call_id: str
    from_us: int
    to_us: int
    over: bool = False

    @property
    def used_us(self) -> int:
        return self.to_us - self.from_us


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceInterval:
    """One interval `[from_at, to_at)` that an instance spent in a state (Unix seconds).

    The time of its `gpu_count` accelerators, in microseconds, is `busy_us` (requests ran), `loading_us` and
    `idle_us`: of instances that share them each moment counts for one kind, and once for each accelerator.
    A long stay in a state is written as several adjacent intervals; `final` is the last. `calls` divides the
    busy time among calls and adds up to it. `epoch` is that of the node's process, the clock of which all its
    intervals use. `earlier_us` is the allocated time before this interval, so that a missing interval is
    detected.
    """

    instance_id: str
    function: str
    version: int
    node: str
    state: str
    from_at: float
    to_at: float
    gpu_count: int
    busy_us: int = 0
    loading_us: int = 0
    idle_us: int = 0
    epoch: int = 0
    final: bool = False
    earlier_us: int = 0
    calls: tuple[CallPart, ...] = ()

    @property
    def allocated_us(self) -> int:
        return self.busy_us + self.loading_us + self.idle_us


@dataclass(frozen=True, slots=True, kw_only=True)
class LostCall:
    """The usage of a call on an instance, written by a node that could not report it to the gateway.

    The time in the request's own record for the same call and instance is not lost, so the lost time is the
    rest of `used_us`. `id` is unique; `call_id` begins with the request id and "/".
    """

    id: str
    call_id: str
    instance_id: str
    node: str
    function: str
    version: int
    used_us: int
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRate:
    """A price: billionths of the currency unit, per GPU-second, per request and per million tokens."""

    id: str
    gpu_type: str
    gpu_second_nanos: int
    request_nanos: int
    prompt_mtoken_nanos: int
    completion_mtoken_nanos: int
    currency: str = "USD"


# No request costs more (nine million of the currency unit), so that sums stay far below 64 bits.
MAX_COST_NANOS = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class CostParts:
    """The price of one request by what is counted, in nanos; each part is rounded up once."""

    request: int
    prompt: int
    completion: int
    gpu: int

    @property
    def total(self) -> int:
        """What the request costs: the sum, at most MAX_COST_NANOS."""
        return min(self.request + self.prompt + self.completion + self.gpu, MAX_COST_NANOS)


def cost_parts(rate: PriceRate, billed_gpu_ms: int, prompt_tokens: int, completion_tokens: int) -> CostParts:
    """Return the integer price of one request by its parts."""
    return CostParts(
        request=rate.request_nanos,
        prompt=-(-rate.prompt_mtoken_nanos * prompt_tokens // 1_000_000),
        completion=-(-rate.completion_mtoken_nanos * completion_tokens // 1_000_000),
        gpu=-(-rate.gpu_second_nanos * billed_gpu_ms // 1000),
    )


def cost_nanos(rate: PriceRate, billed_gpu_ms: int, prompt_tokens: int, completion_tokens: int) -> int:
    """Return the integer price of one request."""
    return cost_parts(rate, billed_gpu_ms, prompt_tokens, completion_tokens).total
