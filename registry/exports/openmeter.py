"""CloudEvents 1.0 for OpenMeter, one for each request. Pure.

OpenMeter takes an event once by its `source` and `id`: https://openmeter.io/docs/metering/events/overview
"""

from typing import Any

from registry.exports.decimals import nanos_text
from registry.exports.moments import rfc3339_ms
from registry.records.usage import PriceRate, RequestRecord

TYPE = "hypercast.request"


def event_of(record: RequestRecord, rate: PriceRate, source: str) -> dict[str, Any]:
    """Return the event of a request; `source` names the cluster. Amounts of money are decimal text."""
    return {
        "specversion": "1.0",
        "id": record.request_id,
        "source": source,
        "type": TYPE,
        "subject": record.tenant,
        "time": rfc3339_ms(record.ended_at),
        "datacontenttype": "application/json",
        "data": {
            "function": record.function,
            "version": record.version,
            "key": record.key_id,
            "status": record.status.value,
            "start_kind": record.start_kind,
            "gpu_type": record.gpu_type,
            "requests": 1,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "gpu_ms": record.billed_gpu_ms,
            "rate": record.rate_id,
            "currency": rate.currency,
            "cost": nanos_text(record.cost_nanos),
            "cost_nanos": record.cost_nanos,
        },
    }
