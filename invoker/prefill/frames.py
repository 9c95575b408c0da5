"""Frames between source and target of a pair (pure; see source.py).

| message | from | payload |
|---|---|---|
| PromptOffer | source | the ids of its tokens, int64 |
| PromptDrop, PromptRequest | source | none |
| PromptHandover | target | hidden states after the layers run, then K and V of each of these layers |
"""

from typing import Annotated

import msgspec

from invoker.links.framing import FrameFormat, FrameReader, new_buffer
from registry.messages.trace import TraceContext

MAX_MESSAGE_BYTES = 1 << 20
MAX_TOKENS = 16_384  # of a prompt that is offered
_ID_BYTES = 8

_Name = Annotated[str, msgspec.Meta(max_length=128)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class PromptOffer(msgspec.Struct, frozen=True, array_like=True):
    """A prompt of the call with that id, queued behind earlier offers."""

    name: _Name
    call: _Name
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    trace: TraceContext | None = None


class PromptDrop(msgspec.Struct, frozen=True, array_like=True):
    """An offered prompt was cancelled."""

    name: _Name


class PromptRequest(msgspec.Struct, frozen=True, array_like=True):
    """The source is free and requests the oldest prompt."""


class PromptHandover(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that returns to the source after `layers` layers; "" if there is none."""

    name: _Name
    layers: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    hidden_bytes: _Bytes
    kv_bytes: _Bytes


PairMessage = PromptOffer | PromptDrop | PromptRequest | PromptHandover
PAIR_FRAMES: FrameFormat[PairMessage] = FrameFormat(
    b"HCZ2", (PromptOffer, PromptDrop, PromptRequest, PromptHandover), max_message_bytes=MAX_MESSAGE_BYTES
)


def encode(message: PairMessage) -> memoryview:
    """Return a frame without its payload."""
    return PAIR_FRAMES.encode(message, payload_bytes(message))


def payload_bytes(message: PairMessage) -> int:
    """Return the size of a message's payload."""
    if isinstance(message, PromptOffer):
        return message.tokens * _ID_BYTES
    return message.hidden_bytes + message.kv_bytes if isinstance(message, PromptHandover) else 0


def pair_reader() -> FrameReader[PairMessage]:
    """Return a reader of a pair's frames; each has its own payload buffer."""
    return FrameReader(PAIR_FRAMES, lambda message, nbytes: new_buffer(nbytes, payload_bytes(message)))
