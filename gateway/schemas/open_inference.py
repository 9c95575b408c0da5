"""Bodies of the Open Inference Protocol, version 2 (KServe; Triton's binary tensor extension)."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.schemas.answers import VERSION
from gateway.schemas.openai import Object, ShortWords

Dimension = Annotated[int, Meta(ge=0, le=1 << 31)]
Shape = Annotated[list[Dimension], Meta(max_length=8)]
TensorName = Annotated[str, Meta(min_length=1, max_length=128)]


class InferInput(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor: its `data`, or with `parameters.binary_data_size` its bytes after the JSON."""

    name: TensorName
    shape: Shape
    datatype: ShortWords
    data: Annotated[list[Any], Meta(max_length=1 << 20)] | None = None
    parameters: Object = {}


class WantedOutput(msgspec.Struct, frozen=True, kw_only=True):
    """An output; with `parameters.binary_data` its bytes are after the JSON."""

    name: TensorName
    parameters: Object = {}


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of an infer. `parameters.binary_data_output` is the default of `binary_data`."""

    id: ShortWords = ""
    inputs: Annotated[list[InferInput], Meta(min_length=1, max_length=8)]
    outputs: Annotated[list[WantedOutput], Meta(max_length=8)] | None = None
    parameters: Object = {}


class InferOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor, its data flat in row-major order; see InferInput for `parameters`."""

    name: str
    shape: Sequence[int]
    datatype: str
    data: Any = None
    parameters: Object | None = None


class InferResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    model_name: str
    model_version: str
    id: str = ""
    outputs: Sequence[InferOutput]


class ServerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    name: Literal["hypercast"] = "hypercast"
    version: str = VERSION
    extensions: Sequence[str] = ("binary_tensor_data",)


class ServerLive(msgspec.Struct, frozen=True, kw_only=True):
    live: bool


class ServerReady(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool


class ModelReady(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ready: bool


class TensorMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of a model; -1 stands for any size."""

    name: str
    datatype: str
    shape: Sequence[int]


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A model. A request gives exactly one of `inputs`: they are alternatives."""

    name: str
    versions: Sequence[str]
    platform: str
    inputs: Sequence[TensorMetadata]
    outputs: Sequence[TensorMetadata]


class InferenceError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error below /v2."""

    error: str
