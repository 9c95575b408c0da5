"""Messages by which nodes that load a model serve it together (see registry/messages.py for the table).

A *pipeline* is a chain of stages, each a range of the model's layers on one node, in an instance of that
node which is still loading. The node with the head (the last stage; the first where the head is tied to
the embedding) runs it: it opens the stages, takes the calls, and draws the tokens.
"""

from typing import Annotated

import msgspec

from registry.message import Message

MAX_STAGES = 64
MAX_LEAVING = 4096
MAX_HELD_BYTES = 1024  # of the bits of layers

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Address = Annotated[str, msgspec.Meta(max_length=512)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Place = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]

MOVED = "moved"  # the finish reason of a call that goes on elsewhere from its tokens so far


class StageOf(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A member: `instance`, on `node`, runs the layers `[first, last)`. `address` is the node's channel."""

    node: _Name
    address: _Address
    instance: _Name
    first: _Count
    last: _Count


class OpenPipeline(Message, frozen=True, kw_only=True):
    """Serve by these stages, in the order of layers, for as long as the call is open: to the node that
    has the head. When the caller leaves, the pipeline ends, and its unfinished calls with it (MOVED).

    One that is formed anew is another pipeline of the same name and a higher epoch; both may be open.

    One of a single stage is a node that loads alone, and runs prompts by layers, as these land: so it has
    little left to do when it is ready.

    With `zigzag` it is a pair: the first of two stages is on a node that loads, and runs as many of its
    layers as there are for prompts that wait at the second, a ready instance, which answers the calls.
    """

    pipeline: _Name
    epoch: _Count
    stages: Annotated[tuple[StageOf, ...], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]
    zigzag: bool = False


class LeaveCalls(Message, frozen=True, kw_only=True):
    """End these calls of a pipeline with the finish reason MOVED; those that it has not are no error. No
    `request_ids`: all that it has, and it takes no more."""

    pipeline: _Name
    epoch: _Count
    request_ids: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_LEAVING)] = ()


class OpenStage(Message, frozen=True, kw_only=True):
    """Run the layers `[first, last)` in `instance` as number `place` of a pipeline's stages, from when their
    bytes are there, for as long as the call is open. From the node that runs the pipeline. With `zigzag`
    those of them that are there, from the first one on, while the others come."""

    pipeline: _Name
    epoch: _Count
    place: _Place
    instance: _Name
    first: _Count
    last: _Count
    zigzag: bool = False


class LinkStage(Message, frozen=True, kw_only=True):
    """Send what comes out of this stage to stage `to`, at the link `following` on the host `host`. Repeating
    it changes nothing."""

    pipeline: _Name
    epoch: _Count
    place: _Place
    to: _Place
    following: _Address
    host: _Name


class PipelineOpened(Message, frozen=True, kw_only=True):
    """All stages answer: it takes calls (Generate.pipeline is `name_of_pipeline`), of at most
    `context_length` tokens each, and `cached_tokens` of all together."""

    context_length: int
    cached_tokens: int


class StageOpened(Message, frozen=True, kw_only=True):
    """The stage waits for steps at `link` (`tcp://host:port`; nodes with equal `host` have a shorter way to
    it), with room for K and V of `pages` pages."""

    link: _Address
    host: _Name
    pages: _Count


class KvStage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Who has K and V of the layers `[first, last)`: asked at `link` on `host` (see StageOpened)."""

    link: _Address
    host: _Name
    first: _Count
    last: _Count


class KvAt(msgspec.Struct, frozen=True, kw_only=True):
    """Where K and V of a sequence lie that a pipeline let go of, for some seconds: at each of its stages."""

    pipeline: _Name
    epoch: _Count
    sequence: _Name
    stages: Annotated[tuple[KvStage, ...], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]


def held_as_bytes(layers: int) -> bytes:
    """Layers as bits (bit i for layer i), as InstanceProgress tells of them."""
    return layers.to_bytes((layers.bit_length() + 7) // 8, "little")


def held_of_bytes(held: bytes) -> int:
    """The other way round."""
    return int.from_bytes(held, "little")


def name_of_pipeline(pipeline: str, epoch: int) -> str:
    """What a pipeline is called where one string is its name: `id.epoch`."""
    return f"{pipeline}.{epoch}"
