"""Events of Lago, one for each meter of a request. Pure.

A billable metric of Lago takes the events of its code, so that each meter has a code of its own. An event
counts once by its `transaction_id` and `timestamp`: https://getlago.com/docs/api-reference/events/usage
"""

from collections.abc import Iterator
from typing import Any

from registry.exports.charges import Meter, charges_of
from registry.exports.decimals import NANO_DIGITS, decimal_text
from registry.exports.moments import unix_ms
from registry.records.usage import PriceRate, RequestRecord

CODES = {
    Meter.REQUESTS: "hypercast_requests",
    Meter.PROMPT: "hypercast_prompt_tokens",
    Meter.COMPLETION: "hypercast_completion_tokens",
    Meter.GPU: "hypercast_gpu_seconds",
}
# Digits of a currency's smallest unit (ISO 4217), where these are not two.
_NO_DIGITS = "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX VND VUV XAF XOF XPF"
_THREE_DIGITS = "BHD IQD JOD KWD LYD OMR TND"
_MINOR_DIGITS = dict.fromkeys(_NO_DIGITS.split(), 0) | dict.fromkeys(_THREE_DIGITS.split(), 3)


def events_of(record: RequestRecord, rate: PriceRate) -> Iterator[dict[str, Any]]:
    """Yield the events of a request; the subscription is its tenant's.

    `precise_total_amount_cents` is the cost in the currency's smallest unit, for Lago's dynamic charges.
    """
    digits = NANO_DIGITS - _MINOR_DIGITS.get(rate.currency, 2)
    for charge in charges_of(record, rate):
        quantity = decimal_text(charge.used, 3 if charge.meter is Meter.GPU else 0, least=0)
        yield {
            "transaction_id": f"{record.request_id}:{charge.meter.value}",
            "external_subscription_id": record.tenant,
            "code": CODES[charge.meter],
            "timestamp": unix_ms(record.ended_at),
            "precise_total_amount_cents": decimal_text(charge.cost_nanos, digits, least=0),
            "properties": {
                "quantity": quantity,
                "function": record.function,
                "version": record.version,
                "key": record.key_id,
                "status": record.status.value,
                "gpu_type": record.gpu_type,
                "currency": rate.currency,
            },
        }
