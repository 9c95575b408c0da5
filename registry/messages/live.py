"""Messages of pipelines, in which loading nodes serve a model together (see the table in `node`).

A *pipeline* is a chain of stages, each a range of the model's layers in an instance that is still loading.
The node with the head of the model (the last stage; the first one where the head is tied to the embedding)
runs it: it opens the stages, takes the calls, and samples the tokens.
"""

from typing import Annotated

import msgspec

from registry.messages.base import Message

MAX_STAGES = 64
MAX_LEAVING = 4096
MAX_HELD_BYTES = 1024  # of a layer bitfield

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Address = Annotated[str, msgspec.Meta(max_length=512)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Place = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]

MOVED = "moved"  # the finish reason of a call that continues on another replica


class StageSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A stage: `instance`, on `node`, runs the layers `[first, last)`; `address` is the node's channel."""

    node: _Name
    address: _Address
    instance: _Name
    first: _Count
    last: _Count


class OpenPipeline(Message, frozen=True, kw_only=True):
    """A request to the head's node to serve by these stages, in layer order, while the call is open.

    When the caller closes the call, the pipeline ends, and its unfinished calls with it (MOVED). A
    reconfigured pipeline has the same name and a higher epoch; both may be open.

    With `layerwise` it is a pair for layer-wise prefill: the first stage is on a loading node, which runs its
    arrived layers for prompts that wait at the second one, a ready instance, which replies to the calls. A
    node that loads alone is a pair of one stage: it runs prompts until it is ready, and then replies.
    """

    pipeline: _Name
    epoch: _Count
    stages: Annotated[tuple[StageSpec, ...], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]
    layerwise: bool = False


class HandOffCalls(Message, frozen=True, kw_only=True):
    """A request to end these calls of a pipeline with the finish reason MOVED; unknown ones are ignored.

    Empty `request_ids` means all calls, and that the pipeline takes no more.
    """

    pipeline: _Name
    epoch: _Count
    request_ids: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_LEAVING)] = ()


class LeaveInstance(Message, frozen=True, kw_only=True):
    """A request to end these calls of an instance with the finish reason MOVED, and to export their K and V.

    They leave between two steps, one after the other; the reply comes when they have. Unknown ones are
    ignored, and those of an engine which exports none stay.
    """

    instance_id: _Name
    request_ids: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_LEAVING)]


class OpenStage(Message, frozen=True, kw_only=True):
    """A request of a pipeline's head to run the layers `[first, last)` in `instance` as stage `place`.

    The stage runs once the bytes of its layers have arrived, while the call is open. With `layerwise` it runs
    the layers that have arrived, from the first one on, while the others are loading.
    """

    pipeline: _Name
    epoch: _Count
    place: _Place
    instance: _Name
    first: _Count
    last: _Count
    layerwise: bool = False


class LinkStage(Message, frozen=True, kw_only=True):
    """A request to send the output of this stage to stage `to`, at link `following` on `host`. Idempotent."""

    pipeline: _Name
    epoch: _Count
    place: _Place
    to: _Place
    following: _Address
    host: _Name


class PipelineOpened(Message, frozen=True, kw_only=True):
    """All stages are open: the pipeline takes calls (Generate.pipeline is `pipeline_name`)."""


class StageOpened(Message, frozen=True, kw_only=True):
    """The stage accepts steps at `link`, with room for `pages` pages of KV cache.

    `link` is `tcp://host:port`; nodes with equal `host` use a local socket instead.
    """

    link: _Address
    host: _Name
    pages: _Count


class KvStage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A stage with the K and V of the layers `[first, last)`, at `link` on `host` (see StageOpened)."""

    link: _Address
    host: _Name
    first: _Count
    last: _Count


class KvLocation(msgspec.Struct, frozen=True, kw_only=True):
    """The location of the exported K and V of a sequence, held for some seconds by each stage.

    Of an instance that hands the sequence off, `pipeline` is its id.
    """

    pipeline: _Name
    epoch: _Count
    sequence: _Name
    stages: Annotated[tuple[KvStage, ...], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]


class PrefetchKv(Message, frozen=True, kw_only=True):
    """A request to fetch the K and V of a sequence for an instance which is to continue it.

    They may still be being exported; the sequence has at most `tokens` tokens by then. A later Generate with
    the same `kv` uses them.
    """

    instance_id: _Name
    kv: KvLocation
    tokens: Annotated[int, msgspec.Meta(gt=0, le=1 << 31)]


def encode_layer_set(layers: int) -> bytes:
    """Encode a layer bitfield (bit i for layer i) for InstanceProgress."""
    return layers.to_bytes((layers.bit_length() + 7) // 8, "little")


def decode_layer_set(held: bytes) -> int:
    """Decode the layer bitfield of InstanceProgress."""
    return int.from_bytes(held, "little")


def pipeline_name(pipeline: str, epoch: int) -> str:
    """Return the name of a pipeline: `id.epoch`."""
    return f"{pipeline}.{epoch}"
