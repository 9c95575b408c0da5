"""What a user's own code may be: it takes a while, and gives the same answer to the same request."""

import time
from typing import Any


def handle(request: Any) -> dict[str, int]:
    """How often each word is in the message."""
    time.sleep(0.05)
    words = str(request["message"]).split()
    return {word: words.count(word) for word in sorted(set(words))}
