"""The messages of webhooks. Pure."""

from typing import Any

import msgspec

from gateway.jobs.batch_view import batch_object
from gateway.jobs.predictions import iso_time, prediction_of
from registry.records.batch import BatchRecord
from registry.records.hook import EndedBatch
from registry.records.job import Job


def hook_message(subject: Job | EndedBatch) -> tuple[str, bytes]:
    """Return the id and the body of the message that reports an end."""
    if isinstance(subject, EndedBatch):
        record = subject.record
        kind, at = f"batch.{record.status.value}", iso_time(_ended_at(record))
        return f"msg_{record.id}", _encoded(kind, at, batch_object(record, subject.counts))
    prediction = prediction_of(subject)
    body = _encoded("prediction.completed", prediction.completed_at, prediction)
    return f"msg_{subject.spec.request_id}", body


def _ended_at(record: BatchRecord) -> float:
    return record.times[record.status.value]


def _encoded(kind: str, at: str | None, data: Any) -> bytes:
    return msgspec.json.encode({"type": kind, "timestamp": at, "data": data})
