"""The header Prefer (RFC 7240): for how long a response may wait."""

import re

MAX_WAIT_S = 60
_WAIT = re.compile(r"wait(?:=([0-9]{1,6}))?")


def preferred_wait_s(prefer: str | None, *, default_s: float) -> float:
    """Return for how long a response may wait for the end."""
    preferences = [preference.strip() for preference in (prefer or "").lower().split(",")]
    if "respond-async" in preferences:
        return 0.0
    for preference in preferences:
        if match := _WAIT.fullmatch(preference):
            return min(float(match[1] or MAX_WAIT_S), MAX_WAIT_S)
    return default_s
