"""Casts as /admin/casts shows them."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
CastOutcome = Literal["running", "complete", "failed", "cancelled"]
PartState = Literal["source", "waiting", "running", "complete", "failed", "cancelled", "lost"]


class CastNodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node's part of a cast: it holds `held` of `blocks` after `seconds` of its own.

    A source sends its copy, or reads the store for the others (`tier` `none`). `planned` is false for a
    node that joined later.
    """

    node: str
    host: str
    tier: str
    planned: bool
    state: PartState
    blocks: Count
    held: Count
    seconds: float
    bytes_s: float
    received: dict[str, int]
    transports: dict[str, str]
    faults: dict[str, int]
    error: str
    updated_at: float | None


class CastView(msgspec.Struct, frozen=True, kw_only=True):
    """A cast. `done` of `targets` nodes are complete; `received`, `faults` and `bytes_s` are totals.

    `seconds` is the time from the plan to the end, or until now.
    """

    cast_id: str
    function: str
    version: int
    image: str
    nbytes: Count
    blocks: Count
    block_bytes: Count
    planner: str
    reason: str
    epoch: Count
    state: CastOutcome
    done: Count
    targets: Count
    started_at: float
    age_s: float
    seconds: float
    bytes_s: float
    received: dict[str, int]
    faults: dict[str, int]
    nodes: list[CastNodeView]


class CastList(msgspec.Struct, frozen=True, kw_only=True):
    """Casts, the latest first."""

    casts: list[CastView]
