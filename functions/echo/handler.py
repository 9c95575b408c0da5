"""The smallest handler: a return value is the answer, a generator is a stream."""

from collections.abc import Iterator
from typing import Any


def handle(request: Any) -> Any:
    """Return the request, or with {"stream": true} its "message" (or its JSON text) word by word."""
    if isinstance(request, dict) and request.get("stream"):
        return words(str(request.get("message", request)))
    return request


def words(text: str) -> Iterator[dict[str, Any]]:
    """Yield one value a word; together they are the text."""
    parts = text.split(" ")
    for index, part in enumerate(parts):
        yield {"index": index, "text": part if index == len(parts) - 1 else part + " "}
