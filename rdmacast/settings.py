"""Time limits and bounds of a link, fixed when it is made."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Time limits of a link; a peer that is silent for `ping_timeout_s` is considered dead."""

    handshake_timeout_s: float = 10.0
    ping_interval_s: float = 5.0
    ping_timeout_s: float = 15.0

    def __post_init__(self) -> None:
        if not 0 < self.ping_interval_s < self.ping_timeout_s:
            raise ValueError("ping_interval_s must be above 0 and below ping_timeout_s")
        if self.handshake_timeout_s <= 0:
            raise ValueError("handshake_timeout_s must be above 0")
