"""Bodies of the generic invoke without an OpenAI counterpart."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.schemas.openai import Input

# Base64, a data URL or a nested array: see gateway/inference/preprocess.py.
Image = (
    Annotated[str, Meta(min_length=1, max_length=32 << 20)]
    | Annotated[list[Any], Meta(min_length=1, max_length=1 << 20)]
)
TopK = Annotated[int, Meta(ge=1, le=1000)]


class ClassifyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An image to classify. An image file may also be the body itself, with its content type."""

    image: Image
    top_k: TopK = 5


class Label(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    score: float
    logit: float


class ClassifyResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The most likely labels, best first; scores are a softmax of the logits over all labels."""

    labels: list[Label]


class FeaturesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts or an image, exactly one of the two."""

    text: Input | None = None
    image: Image | None = None


class FeaturesResponse(msgspec.Struct, frozen=True, kw_only=True):
    features: list[list[float]]
