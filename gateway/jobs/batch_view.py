"""Batches as their clients see them. Pure."""

from gateway.schemas.jobs import BatchError, BatchErrors, BatchObject, BatchRequestCounts
from registry.records.batch import BatchCounts, BatchRecord, BatchStatus


def batch_object(record: BatchRecord, counts: BatchCounts) -> BatchObject:
    """Return what the client sees of a batch."""

    def reached(status: BatchStatus) -> int | None:
        at = record.times.get(status.value)
        return None if at is None else int(at)

    faults = [
        BatchError(code=fault.code, message=fault.message, line=fault.line, param=fault.param)
        for fault in record.faults
    ]
    return BatchObject(
        id=record.id,
        endpoint=record.endpoint,
        errors=BatchErrors(data=faults) if faults else None,
        input_file_id=record.input_file,
        completion_window=record.completion_window,
        status=record.status.value,
        output_file_id=record.output_file or None,
        error_file_id=record.error_file or None,
        created_at=int(record.created_at),
        in_progress_at=reached(BatchStatus.IN_PROGRESS),
        expires_at=int(record.expires_at),
        finalizing_at=reached(BatchStatus.FINALIZING),
        completed_at=reached(BatchStatus.COMPLETED),
        failed_at=reached(BatchStatus.FAILED),
        expired_at=reached(BatchStatus.EXPIRED),
        cancelling_at=reached(BatchStatus.CANCELLING),
        cancelled_at=reached(BatchStatus.CANCELLED),
        request_counts=BatchRequestCounts(
            total=record.total, completed=counts.completed, failed=counts.failed
        ),
        metadata=record.metadata,
        webhook=record.webhook or None,
        webhook_status=None if counts.hook is None else counts.hook.value,
    )
