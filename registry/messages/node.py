"""Messages of the gateway-invoker channel: requests to a node, and its replies.

Each request opens one call on the channel; the node sends a stream of replies, ended by the channel's END or
ERROR frame. Structs are tagged by their class name, so both unions decode by tag. Token ids are ints; units
of times are in the names.

| request | replies, in order |
|---|---|
| StartInstance | InstanceProgress*, InstanceStarted |
| StopInstance, DropImage, UnpinImage, CloseFolders, PrepareLinks, CordonNode | Done |
| WarmImage | InstanceProgress*, Done |
| CheckModel | ModelChecked |
| AddTokenizer | Done |
| PullModel | ModelFolder |
| Generate | Tokens+ (the last with `finish_reason`), Usage |
| Compute | Arrays, Usage |
| InvokeHandler | HandlerChunk+, Usage |
| ForwardRequest | ForwardedHead, ForwardedChunk+, Usage |
| TailLogs | LogChunk* |
| GetStatus | NodeStatus, with `follow` then NodeLoads* until cancelled |
| FollowArrivals | Arrivals+ until cancelled |
| EndCalls | CallsUsed |
| SettleCalls | Done |
| OpenPipeline | PipelineOpened, and no end |
| HandOffCalls, LeaveInstance, LinkStage, PrefetchKv | Done |
| OpenStage | StageOpened, and no end |

Error codes of a node (RemoteError.code): `no_such_instance`, `start_failed`, `unsupported_model`,
`out_of_memory`, `bad_request`, `handler_error`, `handler_not_allowed`, `draining`, `overloaded`,
`no_tokenizer`, `no_such_pipeline`, `pipeline_lost` (a stage was lost: the call is retried elsewhere),
`internal`.

A request with a `trace` has spans of the node, and of what else runs it. A node of an earlier release
ignores it.
"""

from typing import Annotated, Literal

import msgspec

from registry.messages.arrivals import Arrivals, FollowArrivals
from registry.messages.base import Message
from registry.messages.forward import ForwardedChunk, ForwardedHead, ForwardRequest
from registry.messages.images import (
    AddTokenizer,
    CheckModel,
    CloseFolders,
    DropImage,
    ImageRef,
    ModelChecked,
    ModelFolder,
    PrepareLinks,
    PullModel,
    UnpinImage,
    WarmImage,
)
from registry.messages.live import (
    MAX_HELD_BYTES,
    HandOffCalls,
    KvLocation,
    LeaveInstance,
    LinkStage,
    OpenPipeline,
    OpenStage,
    PipelineOpened,
    PrefetchKv,
    StageOpened,
)
from registry.messages.sampling import Sampling, TokenLogprob
from registry.messages.trace import TraceContext
from registry.records.engine import EngineKind
from registry.records.instance import InstanceGroup
from registry.records.node import NodeRecord


class StartInstance(Message, frozen=True, kw_only=True):
    """A request to start an instance. A repetition with the same `instance_id` joins the start in progress.

    `assets` has the small files by name (config.json; for a handler all of its files), `secrets` the values
    of a handler's, which no repr shows. With `live` the progress reports runnable layers, so that the node
    can serve as a stage meanwhile; from host memory it loads the layers from `first_layer` on first. An image
    that is not in host memory arrives in the arena itself, unless the host is to keep a copy (`host_copy`).

    A member of a `group` loads its own layers only; the one with the head opens the pipeline of all, by their
    `channels` (addresses, in the order of members), and is ready when that is.
    """

    instance_id: str
    function: str
    version: int
    task: str
    dtype: str
    context_length: int
    max_concurrency: int
    assets: dict[str, bytes]
    image: ImageRef | None = None
    controller_epoch: int = 0
    controller_incarnation: str = ""
    live: bool = False
    first_layer: Annotated[int, msgspec.Meta(ge=0)] = 0
    host_copy: bool = False
    secrets: dict[str, str] = msgspec.field(default_factory=dict)
    engine: EngineKind = EngineKind.NATIVE
    engine_args: tuple[str, ...] = ()
    native_first: bool = False
    group: InstanceGroup | None = None
    channels: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<StartInstance {self.instance_id} of {self.function}:{self.version}>"


class StopInstance(Message, frozen=True, kw_only=True):
    """A request to drain and stop: calls in flight finish (within `grace_s`), then the region is freed."""

    instance_id: str
    grace_s: float = 30.0


class CordonNode(Message, frozen=True, kw_only=True):
    """A request to publish that no further instances are to be started on the node, or that they may be."""

    cordoned: bool


class Generate(Message, frozen=True, kw_only=True):
    """A request to continue `prompt_ids + generated_ids`.

    `generated_ids` are tokens that this request produced before (on another node); they count against
    `max_tokens` and are not sent again. With a `pipeline` (`id.epoch`) that pipeline runs it instead of the
    instance alone. With `kv` the node may fetch the K and V of the tokens so far instead of recomputing them.
    With `hand_off` the instance ends it with `moved` after its first token, if it does not end there: it is a
    prefill instance, from which others fetch the K and V.
    """

    request_id: str
    instance_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    generated_ids: tuple[int, ...] = ()
    tenant: str = ""  # a node shares its prefill fairly between tenants, not between requests
    pipeline: Annotated[str, msgspec.Meta(max_length=160)] = ""
    kv: KvLocation | None = None
    hand_off: bool = False
    trace: TraceContext | None = None


class Array(msgspec.Struct, frozen=True, kw_only=True):
    """A dense C-contiguous little-endian array; `dtype` is numpy's name (float32, int64, …)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Compute(Message, frozen=True, kw_only=True):
    """A request for one forward pass of an encoder: `kind` and its inputs.

    | kind | inputs | output arrays |
    |---|---|---|
    | embed | `token_ids`, `pooling` (`mean`, `cls`), `normalize` | `embeddings` [n, dim] float32 |
    | classify | `pixels` [n, 3, h, w] float32 | `logits` [n, labels] float32 |
    | text_features, image_features | `token_ids` or `pixels` | `features` [n, dim] float32 |
    """

    request_id: str
    instance_id: str
    kind: Literal["embed", "classify", "text_features", "image_features"]
    token_ids: tuple[tuple[int, ...], ...] = ()
    pixels: Array | None = None
    pooling: str = "mean"
    normalize: bool = True
    trace: TraceContext | None = None


class InvokeHandler(Message, frozen=True, kw_only=True):
    """A request to call a custom handler with a JSON body (UTF-8 bytes)."""

    request_id: str
    instance_id: str
    body: bytes
    timeout_s: float = 300.0
    trace: TraceContext | None = None


class TailLogs(Message, frozen=True, kw_only=True):
    """A request for log lines of a function on this node; with `follow`, new ones until cancelled.

    Lines of versions before `since_version` are of a function of the same name that was deleted.
    """

    function: str
    since_version: int = 0
    lines: int = 100
    follow: bool = False


class GetStatus(Message, frozen=True, kw_only=True):
    """A request for the node's current record; with `follow`, also for the loads of its instances.

    A node of an earlier release ignores `follow`.
    """

    follow: bool = False


class EndCalls(Message, frozen=True, kw_only=True):
    """A request to end these calls if they still run, and report their total usage.

    It makes the bill of an interrupted call exact. For a handler that does not stop within about 2 s it is
    the usage so far. `request_ids` are those of Generate, Compute and InvokeHandler.
    """

    request_ids: tuple[str, ...]


class SettleCalls(Message, frozen=True, kw_only=True):
    """A notice that these calls are in the ledger.

    Until it arrives a node stores the usage of a call, and writes it to the ledger itself (`LostCall`) if the
    gateway's channel breaks.
    """

    request_ids: tuple[str, ...]


Request = (
    StartInstance
    | StopInstance
    | WarmImage
    | CheckModel
    | AddTokenizer
    | PullModel
    | CloseFolders
    | DropImage
    | UnpinImage
    | PrepareLinks
    | CordonNode
    | Generate
    | Compute
    | InvokeHandler
    | ForwardRequest
    | TailLogs
    | GetStatus
    | FollowArrivals
    | EndCalls
    | SettleCalls
    | OpenPipeline
    | HandOffCalls
    | LeaveInstance
    | PrefetchKv
    | OpenStage
    | LinkStage
)


class InstanceProgress(Message, frozen=True, kw_only=True):
    """Progress of a start: `stage` is a start phase (see InstanceRecord), `fraction` 0 to 1.

    `held`, for a `live` start: the runnable layers, bit i (little-endian) for layer i. The embedding belongs
    to the first layer, final norm and head to the last one; a tied head is the embedding.
    """

    stage: str
    fraction: float
    held: Annotated[bytes, msgspec.Meta(max_length=MAX_HELD_BYTES)] = b""


class InstanceStarted(Message, frozen=True, kw_only=True):
    """The end of a successful start; `start_kind` and `phases_ms` as in InstanceRecord."""

    instance_id: str
    start_kind: str
    phases_ms: dict[str, float]


class Acknowledged(Message, frozen=True, kw_only=True):
    """The request was executed; `detail` is a message for people."""

    detail: str = ""


class Tokens(Message, frozen=True, kw_only=True):
    """New tokens of a sequence; only the last message has a `finish_reason` (`stop`, `length`, `moved`).

    With `moved` (possibly without ids) the call continues on another replica, and a RequestUsage still
    follows; `kv` is passed on with the next Generate of the call.

    `gpu_us` is the request's accelerator time so far (0: unknown): the bill of an interrupted request, which
    has no RequestUsage.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""
    gpu_us: int = 0
    kv: KvLocation | None = None


class RequestUsage(Message, frozen=True, kw_only=True):
    """The usage of a request.

    `gpu_us`: its share of accelerator time, in microseconds; requests in one step share the step's time by
    their tokens. `exec_us`: from its first step to its end.
    """

    prompt_tokens: int
    completion_tokens: int
    gpu_us: int
    exec_us: int


class Arrays(Message, frozen=True, kw_only=True):
    """The named output arrays of a Compute."""

    arrays: dict[str, Array]


class HandlerChunk(Message, frozen=True, kw_only=True):
    """A JSON value (UTF-8 bytes); with `stream` the handler is a generator, so more may follow.

    With `usage` it is the last reply of its call.
    """

    data: bytes
    stream: bool = False
    usage: RequestUsage | None = None


class LogChunk(Message, frozen=True, kw_only=True):
    """Log lines, oldest first."""

    lines: tuple[str, ...]


class CallsUsed(Message, frozen=True, kw_only=True):
    """Accelerator time in microseconds by request id; unknown ids are omitted."""

    gpu_us: dict[str, int]


class NodeStatus(Message, frozen=True, kw_only=True):
    """The node's current record."""

    record: NodeRecord


class InstanceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a ready instance that generates, and what it was seen to do (0: not seen yet).

    `queued_prompt_tokens` were accepted and not run yet; `running` sequences have a token, `waiting` none.
    `prefill_tokens_s` is its rate while prompts wait; `decode_steps` are (sequences, seconds of a step), in
    increasing order.
    """

    instance_id: str
    function: str
    version: int
    queued_prompt_tokens: int
    running: int
    waiting: int
    decode_tokens_s: float
    prefill_tokens_s: float
    decode_steps: Annotated[tuple[tuple[int, float], ...], msgspec.Meta(max_length=64)]
    kv_used_tokens: int
    kv_tokens: int


class NodeLoads(Message, frozen=True, kw_only=True):
    """The loads of all ready instances of the node that generate."""

    loads: Annotated[tuple[InstanceLoad, ...], msgspec.Meta(max_length=4096)]


Reply = (
    InstanceProgress
    | InstanceStarted
    | Acknowledged
    | Tokens
    | RequestUsage
    | Arrays
    | HandlerChunk
    | ForwardedHead
    | ForwardedChunk
    | LogChunk
    | NodeStatus
    | NodeLoads
    | Arrivals
    | ModelChecked
    | ModelFolder
    | CallsUsed
    | PipelineOpened
    | StageOpened
)
