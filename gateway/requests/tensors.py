"""Tensors of the Open Inference Protocol: those of a request, and the body of a response. Pure.

A tensor's bytes may follow the JSON (Triton's extension of binary tensor data): little-endian and row-major,
each element of a BYTES tensor after its length in four bytes.
"""

import array
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from gateway.core.errors import BadRequest
from gateway.core.settings import RequestLimits
from gateway.http.limits import decode
from gateway.http.pieces import TimeSlice, join_arrays
from gateway.requests.compute import Vector
from gateway.schemas.open_inference import InferInput, InferOutput, InferRequest, InferResponse
from registry.messages.node import Array

HEADER_LENGTH = b"inference-header-content-length"
_SHARED = "shared_memory_region"
_CODES = {"FP32": "f", "INT32": "i", "INT64": "q"}
_PIECE = 16  # vectors

_decoder = msgspec.json.Decoder(InferRequest)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a request; `raw` are its bytes if they followed the JSON."""

    given: InferInput
    raw: bytes | None

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.given.shape)

    def refused(self, why: str) -> BadRequest:
        """Return the error for a tensor that cannot be used."""
        return BadRequest(f"input {self.given.name!r} {why}", param=self.given.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """A request with its tensors, by name."""

    request: InferRequest
    tensors: dict[str, Tensor]

    def is_binary(self, output: str) -> bool:
        """Return whether an output's bytes follow the JSON. Raises BadRequest for other outputs and forms."""
        wanted = self.request.outputs
        if not wanted:
            return self.request.parameters.get("binary_data_output") is True
        for one in wanted:
            if one.name != output:
                raise BadRequest(f"there is no output {one.name!r}: it has {output!r}", param="outputs")
            if one.parameters.get("classification") or _SHARED in one.parameters:
                raise BadRequest(
                    "classification and shared memory are not supported",
                    param="outputs",
                    code="unsupported_parameter",
                )
        default = self.request.parameters.get("binary_data_output", False)
        return wanted[0].parameters.get("binary_data", default) is True


def parse_inference(body: bytes, header_length: bytes | None, limits: RequestLimits) -> Inference:
    """Return the request of a body, of which the JSON is `header_length`, else all. Raises ApiError."""
    end = len(body)
    if header_length is not None:
        if not header_length.isdigit() or len(header_length) > 18 or int(header_length) > end:
            raise BadRequest(f"{HEADER_LENGTH.decode()} must be the length of the JSON in the body")
        end = int(header_length)
    request = decode(body[:end], _decoder, limits, limits.image_json)
    tensors: dict[str, Tensor] = {}
    for given in request.inputs:
        raw, size = None, given.parameters.get("binary_data_size")
        if _SHARED in given.parameters:
            raise BadRequest("shared memory is not supported", param=given.name, code="unsupported_parameter")
        if size is not None:
            if not isinstance(size, int) or not 0 <= size <= len(body) - end:
                raise BadRequest(f"binary_data_size of {given.name!r} is not in the body", param=given.name)
            raw, end = body[end : end + size], end + size
        elif given.data is None:
            raise BadRequest(f"input {given.name!r} has neither data nor binary_data_size", param=given.name)
        if given.name in tensors:
            raise BadRequest(f"input {given.name!r} is there twice", param=given.name)
        tensors[given.name] = Tensor(given=given, raw=raw)
    if end != len(body):
        raise BadRequest("the body is longer than its JSON and binary data")
    return Inference(request=request, tensors=tensors)


def byte_strings(tensor: Tensor, limit: int) -> list[bytes]:
    """Return the elements of a BYTES tensor, at most `limit`. Raises BadRequest."""
    if tensor.given.datatype != "BYTES" or not 0 < tensor.count <= limit:
        raise tensor.refused(f"must be of the datatype BYTES, with 1 to {limit} elements")
    elements = _of_json(tensor) if tensor.raw is None else _of_binary(tensor, tensor.raw)
    found = list(islice(elements, tensor.count + 1))
    if len(found) != tensor.count:
        raise tensor.refused(f"has other than the {tensor.count} elements of its shape")
    return found


def texts(tensor: Tensor, limit: int) -> list[str]:
    """Return the elements of a BYTES tensor [n] or [n, 1] as texts, at most `limit`. Raises BadRequest."""
    try:
        return [one.decode() for one in byte_strings(tensor, limit)]
    except UnicodeDecodeError:
        raise tensor.refused("must be UTF-8") from None


def token_ids(ids: Tensor, mask: Tensor | None, limit: int) -> list[list[int]]:
    """Return the rows of an integer tensor [n, t], without what a mask of the same shape leaves out."""
    rows = _integer_rows(ids, limit)
    if mask is None:
        return rows
    if mask.given.shape != ids.given.shape:
        raise mask.refused("must have the shape of the token ids")
    kept = _integer_rows(mask, limit)
    return [
        [one for one, is_kept in zip(*pair, strict=True) if is_kept] for pair in zip(rows, kept, strict=True)
    ]


def pixel_array(tensor: Tensor, limit: int) -> Array:
    """Return an FP32 tensor [n, 3, height, width] for a node. Raises BadRequest."""
    shape = tensor.given.shape
    if tensor.given.datatype != "FP32" or len(shape) != 4 or not 0 < shape[0] <= limit:
        raise tensor.refused(f"must be FP32 of the shape [n, channels, height, width], n at most {limit}")
    return Array(dtype="float32", shape=tuple(shape), data=_numbers(tensor).tobytes())


def _integer_rows(tensor: Tensor, limit: int) -> list[list[int]]:
    shape = tensor.given.shape
    if tensor.given.datatype not in ("INT32", "INT64") or len(shape) != 2 or not 0 < shape[0] <= limit:
        raise tensor.refused(f"must be INT64 or INT32 of the shape [n, tokens], n at most {limit}")
    flat, width = list(map(int, _numbers(tensor))), shape[1]
    return [flat[start * width : (start + 1) * width] for start in range(shape[0])]


def _numbers(tensor: Tensor) -> "array.array[Any]":
    found: array.array[Any] = array.array(_CODES[tensor.given.datatype])
    try:
        if tensor.raw is None:
            found.extend(_flat(tensor.given.data))
        else:
            found.frombytes(tensor.raw)
    except (TypeError, ValueError, OverflowError):
        raise tensor.refused(f"must be numbers of the datatype {tensor.given.datatype}") from None
    if len(found) != tensor.count:
        raise tensor.refused(f"has other than the {tensor.count} elements of its shape")
    return found


def _flat(data: object) -> Iterator[Any]:
    """Yield the elements of nested lists, whose depth the body's bounds limit."""
    if not isinstance(data, list):
        yield data
        return
    for inner in data:
        if isinstance(inner, list):
            yield from _flat(inner)
        else:
            yield inner


def _of_json(tensor: Tensor) -> Iterator[bytes]:
    for element in _flat(tensor.given.data):
        if not isinstance(element, str):
            raise tensor.refused("must have texts as its data")
        yield element.encode()


def _of_binary(tensor: Tensor, raw: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        if at + 4 > len(raw):
            raise tensor.refused("ends within a length")
        (length,) = struct.unpack_from("<I", raw, at)
        at += 4
        if at + length > len(raw):
            raise tensor.refused("ends within an element")
        yield raw[at : at + length]
        at += length


async def encode_response(
    response: InferResponse, output: str, vectors: Sequence[Vector], *, binary: bool
) -> tuple[bytes, int | None]:
    """Return the body with a matrix of vectors, and the length of its JSON if bytes follow it."""
    width = len(vectors[0]) if vectors else 0
    shape = (len(vectors), width)
    if binary:
        raw = b"".join([vector.tobytes() for vector in vectors])
        sized = {"binary_data_size": len(raw)}
        made = InferOutput(name=output, shape=shape, datatype="FP32", parameters=sized)
        head = _encode(msgspec.structs.replace(response, outputs=[made]))
        return head + raw, len(head)
    pieces, time_slice = list[bytes](), TimeSlice()
    for start in range(0, len(vectors), _PIECE):
        numbers = [number for vector in vectors[start : start + _PIECE] for number in vector]
        pieces.append(_encode(numbers))
        await time_slice.pause()
    made = InferOutput(name=output, shape=shape, datatype="FP32", data=join_arrays(pieces))
    return _encode(msgspec.structs.replace(response, outputs=[made])), None
