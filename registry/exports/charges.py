"""A record's cost by what is counted: requests, tokens, GPU time. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from registry.records.usage import PriceRate, RequestRecord, cost_parts


class Meter(StrEnum):
    """What is counted."""

    REQUESTS = "requests"
    PROMPT = "prompt-tokens"
    COMPLETION = "completion-tokens"
    GPU = "gpu-time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What a record used of one meter (requests, tokens, or milliseconds of GPU time), and its cost."""

    meter: Meter
    used: int
    cost_nanos: int


def unit_price_nanos(rate: PriceRate, meter: Meter) -> int:
    """Return the price of one request, a million tokens, or a second of GPU time."""
    match meter:
        case Meter.REQUESTS:
            return rate.request_nanos
        case Meter.PROMPT:
            return rate.prompt_mtoken_nanos
        case Meter.COMPLETION:
            return rate.completion_mtoken_nanos
        case Meter.GPU:
            return rate.gpu_second_nanos


def charges_of(record: RequestRecord, rate: PriceRate) -> list[Charge]:
    """Return what the record used and what of its cost is for that; the costs add up to the record's.

    A record may cost less than all that it used: a failed request is free of charge, and of a cancelled one
    what failed is. Its cost is then divided in proportion to the prices of the parts. Parts that were neither
    used nor cost anything are left out, but for the request.
    """
    full = cost_parts(rate, record.billed_gpu_ms, record.prompt_tokens, record.completion_tokens)
    parts = (
        (Meter.REQUESTS, 1, full.request),
        (Meter.PROMPT, record.prompt_tokens, full.prompt),
        (Meter.COMPLETION, record.completion_tokens, full.completion),
        (Meter.GPU, record.billed_gpu_ms, full.gpu),
    )
    whole = sum(price for _, _, price in parts)
    found: list[Charge] = []
    before = priced = 0
    for meter, used, price in parts:
        if whole:
            # Cumulative, so that the parts add up to the cost exactly.
            priced += price
            upto = record.cost_nanos * priced // whole
        else:
            upto = record.cost_nanos  # of a rate that is not known any more: all for the request
        if used or upto - before:
            found.append(Charge(meter=meter, used=used, cost_nanos=upto - before))
        before = upto
    return found


UNPRICED = PriceRate(
    id="unpriced",
    gpu_type="",
    gpu_second_nanos=0,
    request_nanos=0,
    prompt_mtoken_nanos=0,
    completion_mtoken_nanos=0,
)
"""The rate of records of devices which the price table lacks."""
