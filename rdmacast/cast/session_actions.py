"""The actions of a session (pure)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StartPull:
    """Read the block from the source, which may not hold it yet, and check it.

    Call `on_started` at the first byte, then `on_arrived`, `on_damaged` or `on_failed`.
    """

    number: int
    source: int
    block: int


@dataclass(frozen=True, slots=True)
class DropPull:
    """End the pull's read; `late`: it took too long.

    Until one of its three end events, the block is not pulled again: a read may still write into it.
    """

    number: int
    reason: str
    late: bool = False


@dataclass(frozen=True, slots=True)
class RequestHave:
    """Request the peer's bitfield; the reply is passed to `on_bitfield` with this number."""

    peer: int
    number: int


@dataclass(frozen=True, slots=True)
class PublishBitfield:
    """Publish our bitfield, which has changed."""


Action = StartPull | DropPull | RequestHave | PublishBitfield
