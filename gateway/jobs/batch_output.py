"""The lines of a batch's results, as OpenAI's API has them. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from registry.records.job import JobStatus, LineResult


def split_results(results: Sequence[LineResult]) -> tuple[bytes, bytes]:
    """Return the lines of the output file and of the error file."""
    output: list[bytes] = []
    errors: list[bytes] = []
    for result in results:
        good = result.outcome.status is JobStatus.SUCCEEDED
        (output if good else errors).append(msgspec.json.encode(_line(result)) + b"\n")
    return b"".join(output), b"".join(errors)


def _line(result: LineResult) -> dict[str, Any]:
    spec, outcome = result.spec, result.outcome
    response = error = None
    if outcome.status is JobStatus.CANCELLED:
        error = {"code": "batch_cancelled", "message": "the batch was cancelled before this call had ended"}
    elif not result.result:
        error = {"code": "no_response", "message": "the call has no response"}
    else:
        response = {
            "status_code": outcome.status_code,
            "request_id": spec.request_id,
            "body": result.result,
        }
    return {
        "id": f"batch_req_{spec.request_id.removeprefix('req-')}",
        "custom_id": spec.custom_id,
        "response": response,
        "error": error,
    }
