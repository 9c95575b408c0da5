"""Bodies of /v1/rerank, in the form that Cohere, Jina and vLLM share."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.schemas.openai import Name, ShortWords, UsageInfo, Words


class RerankText(msgspec.Struct, frozen=True, kw_only=True):
    text: Words


Document = Annotated[str, Meta(min_length=1, max_length=4 << 20)] | RerankText


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/rerank: the documents are sorted by how near they are to the query, the nearest first."""

    model: Name
    query: Annotated[str, Meta(min_length=1, max_length=4 << 20)]
    documents: Annotated[list[Document], Meta(min_length=1, max_length=1 << 16)]
    top_n: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    return_documents: bool | None = None
    user: ShortWords | None = None


class RerankResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`relevance_score` is the cosine of the two vectors' angle, -1 to 1; `index` counts the documents."""

    index: int
    relevance_score: float
    document: RerankText | None = None


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    model: str
    results: list[RerankResult]
    usage: UsageInfo
