"""Bodies of predictions, files and batches."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.schemas.openai import Object
from registry.records.batch import FilePurpose
from registry.records.function import NAME_PATTERN

_SPEC = rf"^{NAME_PATTERN.pattern}(:[1-9][0-9]{{0,8}})?$"
PREDICTION_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
Spec = Annotated[str, Meta(pattern=_SPEC)]
Url = Annotated[str, Meta(min_length=8, max_length=2048)]
WebhookEvents = Annotated[list[Literal["completed"]], Meta(max_length=4)]
FileId = Annotated[str, Meta(pattern=r"^file-[0-9a-f]{24}$")]
MetadataKey = Annotated[str, Meta(min_length=1, max_length=64)]
Metadata = Annotated[dict[MetadataKey, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
BATCH_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


class PredictionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the function `model` (`NAME` or `NAME:VERSION`), which runs when there is room.

    `input` is the body of the function's invoke. `webhook` gets the prediction when it has ended.
    """

    model: Spec
    input: Object
    webhook: Url | None = None
    webhook_events_filter: WebhookEvents | None = None


class PredictionUrls(msgspec.Struct, frozen=True, kw_only=True):
    get: str
    cancel: str


class PredictionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction in a list. `error` has the fields of an error's envelope; `request_id` names its bill.

    Times are ISO 8601 in UTC. `webhook_status` is `waiting`, `delivered` or `failed`.
    """

    id: str
    model: str
    version: int | None
    status: Literal["starting", "processing", "succeeded", "failed", "canceled"]
    error: Object | None
    request_id: str
    created_at: str
    started_at: str | None
    completed_at: str | None
    webhook: str | None
    webhook_status: str | None
    metrics: dict[str, float]
    urls: PredictionUrls


class Prediction(PredictionEntry, frozen=True, kw_only=True):
    """A prediction as it is now."""

    input: Any
    output: Any


class PredictionList(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions, the latest first."""

    data: list[PredictionEntry]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class WebhookSecret(msgspec.Struct, frozen=True, kw_only=True):
    """The secret by which the webhooks of the key's tenant are signed (Standard Webhooks)."""

    secret: str


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file, in the form of OpenAI's API. Times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: FilePurpose
    status: Literal["processed"] = "processed"
    object: Literal["file"] = "file"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """Files, the latest first."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class CreateBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A file of calls to run within a day. `webhook` gets the batch when it has ended."""

    input_file_id: FileId
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    webhook: Url | None = None
    webhook_events_filter: WebhookEvents | None = None


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    data: list[BatchError]
    object: Literal["list"] = "list"


class BatchRequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, in the form of OpenAI's API, and its webhook. Times are Unix seconds."""

    id: str
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    metadata: dict[str, str] | None
    webhook: str | None
    webhook_status: str | None
    object: Literal["batch"] = "batch"


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """Batches, the latest first."""

    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"
