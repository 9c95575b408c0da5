"""Messages of the gateway-invoker channel: what may be asked of a node, and what comes back.

Each request opens one call on the channel; the node answers with a stream of replies, ended by the
channel's END or ERROR frame. Structs are tagged by their class name, so both unions decode by tag.
Token ids are plain ints; times are in the unit that the name says.

| request | replies, in order |
|---|---|
| StartInstance | InstanceProgress*, InstanceStarted |
| StopInstance, DropImage, UnkeepImage | Done |
| WarmImage | InstanceProgress*, Done |
| Generate | Tokens+ (the last with `finish_reason`), Usage |
| Compute | Arrays, Usage |
| InvokeHandler | HandlerChunk+, Usage |
| TailLogs | LogLines* |
| GetStatus | NodeStatus |
| EndCalls | CallsUsed |
| SettleCalls | Done |
| OpenPipeline | PipelineOpened, and no end |
| LeaveCalls, LinkStage | Done |
| OpenStage | StageOpened, and no end |

Error codes a node may answer with (RemoteError.code): `no_such_instance`, `start_failed`,
`out_of_memory`, `bad_request`, `handler_error`, `handler_not_allowed`, `draining`, `overloaded`,
`no_such_pipeline`, `pipeline_lost` (a stage is gone: the call goes on elsewhere), `internal`.
"""

from typing import Annotated, Literal

import msgspec

from registry.live_messages import (
    MAX_HELD_BYTES,
    KvAt,
    LeaveCalls,
    LinkStage,
    OpenPipeline,
    OpenStage,
    PipelineOpened,
    StageOpened,
)
from registry.message import Message
from registry.node import NodeRecord

MAX_CAST_MEMBERS = 4096


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A node that holds (or is loading) an image. `cast` is the address of its region server."""

    node: str
    host: str
    cast: str
    tier: str  # "gpu" or "host"


class CastPeer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A member of a cast. `address` is that of its region server."""

    node: str
    host: str
    address: str


class CastRef(msgspec.Struct, frozen=True, kw_only=True):
    """The cast by which an image is to come; the fields are those of CastRecord."""

    cast_id: str
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    planner: str
    block_bytes: Annotated[int, msgspec.Meta(gt=0)]
    members: Annotated[tuple[CastPeer, ...], msgspec.Meta(min_length=2, max_length=MAX_CAST_MEMBERS)]
    sources: Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=MAX_CAST_MEMBERS)]
    planned: Annotated[int, msgspec.Meta(ge=1, le=MAX_CAST_MEMBERS)]
    edge: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_CAST_MEMBERS)] = ()
    in_turn: bool = False
    link_bytes_s: Annotated[int, msgspec.Meta(ge=0)] = 0


class ImageRef(msgspec.Struct, frozen=True, kw_only=True):
    """An image to fetch: its digest, the digest of its manifest, and who holds it.

    With a `cast` the node takes part in it, and asks `holders` for what does not come by it. With no
    `holders` the node reads the store; with some it never does, until all of them failed.
    """

    image: str
    manifest: str
    nbytes: int
    holders: tuple[Holder, ...] = ()
    manifest_bytes: bytes = b""  # the manifest itself, so that a node needs no store for it
    cast: CastRef | None = None


class StartInstance(Message, frozen=True, kw_only=True):
    """Start an instance. Repeating it with the same `instance_id` joins the start under way.

    `assets` carries the small files by name (config.json; for a handler all of its files). With `live` the
    progress tells which layers can run, so that the node can serve as a stage meanwhile; of what is in the
    node's host memory it takes the layers from `first_layer` on first.
    """

    instance_id: str
    function: str
    version: int
    task: str
    architecture: str
    dtype: str
    context_length: int
    max_concurrency: int
    assets: dict[str, bytes]
    image: ImageRef | None = None
    controller_epoch: int = 0
    live: bool = False
    first_layer: Annotated[int, msgspec.Meta(ge=0)] = 0


class StopInstance(Message, frozen=True, kw_only=True):
    """Drain and stop: requests in flight finish (at most `grace_s`), then the region is freed."""

    instance_id: str
    grace_s: float = 30.0


class WarmImage(Message, frozen=True, kw_only=True):
    """Bring an image into the node's host tier.

    With `keep` the copy is the one that the cluster keeps: its host evicts it only as a last resort,
    until an UnkeepImage or a DropImage of it. One that is here already is merely marked. With
    `yielding` the call fails (`out_of_memory`) rather than push out another kept copy.
    """

    image: ImageRef
    function: str = ""
    keep: bool = False
    yielding: bool = False


class UnkeepImage(Message, frozen=True, kw_only=True):
    """The host's copy of the image is no longer the one that the cluster keeps; it stays, as any other."""

    image: str


class DropImage(Message, frozen=True, kw_only=True):
    """Drop an idle image from a tier: `gpu` or `host`."""

    image: str
    tier: str


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. `temperature=0` is greedy. A draw depends on (`seed`, position) alone,
    so the same seed continues identically elsewhere. `logprobs`: None, or how many alternatives."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    logprobs: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Generate(Message, frozen=True, kw_only=True):
    """Continue `prompt_ids + generated_ids`. `generated_ids` are tokens that this request produced
    before (on another node); they count against `max_tokens` and are not sent again. With a `pipeline`
    (`id.epoch`) this runs it, rather than the instance alone. With `kv` the node may fetch the K and V of
    the tokens so far instead of computing them anew."""

    request_id: str
    instance_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    generated_ids: tuple[int, ...] = ()
    flow: str = ""  # whose it is: a node shares its prefill between flows, not between requests
    pipeline: Annotated[str, msgspec.Meta(max_length=160)] = ""
    kv: KvAt | None = None


class Array(msgspec.Struct, frozen=True, kw_only=True):
    """A dense C-contiguous little-endian array; `dtype` is numpy's name (float32, int64, …)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Compute(Message, frozen=True, kw_only=True):
    """One forward of an encoder: `kind` and its inputs.

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


class InvokeHandler(Message, frozen=True, kw_only=True):
    """Call a custom handler with a JSON body (UTF-8 bytes)."""

    request_id: str
    instance_id: str
    body: bytes
    timeout_s: float = 300.0


class TailLogs(Message, frozen=True, kw_only=True):
    """Log lines of a function on this node; with `follow`, new ones until the call is cancelled."""

    function: str
    lines: int = 100
    follow: bool = False


class GetStatus(Message, frozen=True, kw_only=True):
    """The node's own record, fresh."""


class EndCalls(Message, frozen=True, kw_only=True):
    """End these calls if they run still, and tell what each used in all: asked for a call that was cut
    short, so that its bill is exact. Of a handler that does not stop within some 2 s it is what it used so
    far. `request_ids` are those of Generate, Compute and InvokeHandler."""

    request_ids: tuple[str, ...]


class SettleCalls(Message, frozen=True, kw_only=True):
    """These calls are in the ledger. Until this comes a node remembers what a call used, and writes it
    to the ledger itself (`LostCall`) if the gateway's channel breaks."""

    request_ids: tuple[str, ...]


Request = (
    StartInstance
    | StopInstance
    | WarmImage
    | DropImage
    | UnkeepImage
    | Generate
    | Compute
    | InvokeHandler
    | TailLogs
    | GetStatus
    | EndCalls
    | SettleCalls
    | OpenPipeline
    | LeaveCalls
    | OpenStage
    | LinkStage
)


class InstanceProgress(Message, frozen=True, kw_only=True):
    """`stage` is a start phase (see InstanceRecord); `fraction` 0 to 1.

    `held`, of a start that is `live`: the layers that can run here, bit i (little-endian) for layer i. The
    embedding goes with the first, final norm and head with the last; a tied head is the embedding.
    """

    stage: str
    fraction: float
    held: Annotated[bytes, msgspec.Meta(max_length=MAX_HELD_BYTES)] = b""


class InstanceStarted(Message, frozen=True, kw_only=True):
    """The instance is ready. `start_kind` says from which tier; `phases_ms` as in InstanceRecord."""

    instance_id: str
    start_kind: str
    phases_ms: dict[str, float]


class Done(Message, frozen=True, kw_only=True):
    """The request was carried out. `detail` is for people."""

    detail: str = ""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probability of the chosen token, and the best alternatives, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Tokens(Message, frozen=True, kw_only=True):
    """New tokens of a sequence. `finish_reason` (`stop`, `length`) stands on the last message only; with
    `moved` (possibly without ids) the call is to go on elsewhere, and a Usage of it follows none the less;
    `kv` goes with the next Generate of it.

    `gpu_us` is the request's accelerator time so far (0: not told): what a request that is cut short,
    and so never gets its Usage, is billed.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str = ""
    gpu_us: int = 0
    kv: KvAt | None = None


class Usage(Message, frozen=True, kw_only=True):
    """What the request used. `gpu_us`: its share of accelerator time, in microseconds; requests that
    run in one step share that step's time by their tokens. `queue_us`: waiting inside the node."""

    prompt_tokens: int
    completion_tokens: int
    gpu_us: int
    queue_us: int
    exec_us: int


class Arrays(Message, frozen=True, kw_only=True):
    """Named output arrays of a Compute."""

    arrays: dict[str, Array]
    token_counts: tuple[int, ...] = ()


class HandlerChunk(Message, frozen=True, kw_only=True):
    """A JSON value (UTF-8 bytes). `stream` says that the handler yields, so more may follow."""

    data: bytes
    stream: bool = False


class LogLines(Message, frozen=True, kw_only=True):
    """Log lines, oldest first."""

    lines: tuple[str, ...]


class CallsUsed(Message, frozen=True, kw_only=True):
    """Accelerator time in microseconds by request id; one that the node does not know is left out."""

    gpu_us: dict[str, int]


class NodeStatus(Message, frozen=True, kw_only=True):
    """The node's record as of now."""

    record: NodeRecord


Reply = (
    InstanceProgress
    | InstanceStarted
    | Done
    | Tokens
    | Usage
    | Arrays
    | HandlerChunk
    | LogLines
    | NodeStatus
    | CallsUsed
    | PipelineOpened
    | StageOpened
)
