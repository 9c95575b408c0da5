"""Records to JSON and back, typed: what does not decode names the key that it stood under."""

from typing import Any, TypeVar

import msgspec

from registry.change import (
    CastChanged,
    CastPartEnded,
    Change,
    DemandChanged,
    FunctionChanged,
    FunctionDeleted,
    InstanceChanged,
    LiveChanged,
    NodeGone,
    NodeUp,
    ScaleAsked,
)
from registry.errors import InvalidRecord

T = TypeVar("T")

# The kind of a change in the feed is its class name: JSON alone would not tell the classes apart.
_CHANGES: dict[bytes, type[Change]] = {
    kind.__name__.encode(): kind
    for kind in (
        NodeUp,
        NodeGone,
        InstanceChanged,
        FunctionChanged,
        FunctionDeleted,
        DemandChanged,
        ScaleAsked,
        CastChanged,
        CastPartEnded,
        LiveChanged,
    )
}

# Building a decoder costs far more than a decode.
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}

encode = msgspec.json.Encoder().encode


def decode(kind: type[T], data: bytes | str, key: str) -> T:
    """The record of type `kind` in `data`. Raises InvalidRecord naming `key`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        record: T = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRecord(f"{key} does not hold a {kind.__name__}: {error}") from error
    return record


def kind_of(change: Change) -> str:
    """The name under which a change stands in the feed."""
    return type(change).__name__


def decode_change(kind: bytes, data: bytes, key: str) -> Change | None:
    """The change of an entry of the feed, or None for a kind that this release does not know."""
    known = _CHANGES.get(kind)
    return None if known is None else decode(known, data, key)
