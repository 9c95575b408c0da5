"""What a session has its node do (pure)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pull:
    """Read the block from the source, which may not hold it yet, and check it. Tell `began` when the source
    begins to give it, then `arrived`, `damaged` or `failed`."""

    number: int
    source: int
    block: int


@dataclass(frozen=True, slots=True)
class Drop:
    """End the pull's read. Until one of the three is told of it, its block is not pulled again: a read
    may still write into it. `late`: it took too long."""

    number: int
    reason: str
    late: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the peer what it holds; its answer goes to `heard`, with the number of the question."""

    peer: int
    number: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell the peers what we hold: `have_map` has changed."""


Action = Pull | Drop | Ask | Publish
