"""Casts as /admin/casts shows them."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
CastOutcome = Literal["running", "complete", "failed", "cancelled"]
PartState = Literal["source", "waiting", "running", "complete", "failed", "cancelled", "lost"]


class CastNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node's part: it `held` so many of `blocks` after `seconds` of its own. A source gives, or reads the
    store for the others (`tier` `none`). `planned` is false for one that joined later."""

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


class CastShown(msgspec.Struct, frozen=True, kw_only=True):
    """A cast. `done` of `targets` nodes have it all; `received`, `faults` and `bytes_s` are of all of them;
    `seconds` are from its plan to its end, or until now."""

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
    nodes: list[CastNode]


class CastList(msgspec.Struct, frozen=True, kw_only=True):
    """The latest first."""

    casts: list[CastShown]
