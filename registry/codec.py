"""Typed encoding of records as JSON; a decoding error names the Redis key of the value."""

from typing import Any, TypeVar, get_args

import msgspec

from registry.errors import InvalidRecord
from registry.records.api_key import ApiKey
from registry.records.change import Change, FunctionChanged
from registry.records.function import Function, FunctionVersion
from registry.records.schema import BASE_SCHEMA, check_schema

T = TypeVar("T")

# The kind of a change in the feed is its class name: JSON alone does not distinguish the classes.
_CHANGES: dict[bytes, type[Change]] = {kind.__name__.encode(): kind for kind in get_args(Change)}

# Building a decoder costs far more than a decode.
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}

# Kinds of records that may be marked with a schema.
_MARKED = frozenset({ApiKey, Function, FunctionChanged, FunctionVersion})

encode = msgspec.json.Encoder().encode


def encode_marked(record: object, schema: int) -> bytes:
    """Encode a record that needs a schema: beyond the base as `[schema, record]`.

    A release that knows only objects refuses the array, also one from before there was this mark.
    """
    raw = encode(record)
    return raw if schema <= BASE_SCHEMA else b"[%d,%b]" % (schema, raw)


def decode(kind: type[T], data: bytes | str, key: str) -> T:
    """Decode a record of type `kind`. Raises InvalidRecord, which names `key`, and NewerSchema."""
    if kind in _MARKED and data[:1] in (b"[", "["):
        schema, data = decode(tuple[int, msgspec.Raw], data, key)
        check_schema(schema)
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        record: T = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRecord(f"{key} does not hold a {kind.__name__}: {error}") from error
    return record


def kind_of(change: Change) -> str:
    """Return the name of the kind of change in the feed."""
    return type(change).__name__


def decode_change(kind: bytes, data: bytes, key: str) -> Change | None:
    """Decode an entry of the feed; None for a kind that this release does not know."""
    known = _CHANGES.get(kind)
    return None if known is None else decode(known, data, key)
