"""An example of user code: slow, and deterministic per request."""

import time
from typing import Any


def handle(request: Any) -> dict[str, int]:
    """Count each word of the message."""
    time.sleep(0.05)
    words = str(request["message"]).split()
    return {word: words.count(word) for word in sorted(set(words))}
