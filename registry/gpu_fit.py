"""Use that is spread over time, fitted into the time in which there was room for it. Pure.

A request is known by its start and end, so that its use is spread evenly between them: of requests that
ran together, one bucket may be given more than its instance had. What is too much goes to the buckets
after it, or before it; whole sums stay as they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Use:
    """What was used of an accelerator, and what of it was billed (rounded up), in microseconds."""

    used_us: int = 0
    billed_us: int = 0

    def add(self, other: "Use") -> None:
        self.used_us += other.used_us
        self.billed_us += other.billed_us


Uses = dict[str, Use]


def fit(room_us: Mapping[int, int], uses: Mapping[int, Uses]) -> dict[int, Uses]:
    """The uses by bucket and tenant, with no bucket over its room as far as there is room in all.

    Buckets before the first and after the last that is known are left as they are: what an instance
    did in them is not written down yet.
    """
    if not room_us:
        return {bucket: dict(of_bucket) for bucket, of_bucket in uses.items()}
    first, last = min(room_us), max(room_us)
    placed: dict[int, Uses] = {
        bucket: dict(of_bucket) for bucket, of_bucket in uses.items() if not first <= bucket <= last
    }
    within = sorted({*room_us, *(bucket for bucket in uses if first <= bucket <= last)})
    free_us: dict[int, int] = {}
    carried: Uses = {}
    for bucket in within:
        _add(carried, uses.get(bucket, {}))
        here, carried = _split(carried, room_us.get(bucket, 0))
        free_us[bucket] = room_us.get(bucket, 0) - _total(here.values())
        _add(placed.setdefault(bucket, {}), here)
    for bucket in reversed(within):
        if not carried:
            break
        here, carried = _split(carried, free_us[bucket])
        _add(placed[bucket], here)
    _add(placed[last], carried)
    return placed


def _split(uses: Uses, room_us: int) -> tuple[Uses, Uses]:
    """What fits into the room, shared by how much each used, and the rest."""
    total_us = _total(uses.values())
    if total_us <= room_us:
        return uses, {}
    here: Uses = {}
    rest: Uses = {}
    before_us = 0
    for tenant, use in uses.items():
        upto_us = before_us + use.used_us
        taken_us = room_us * upto_us // total_us - room_us * before_us // total_us
        before_us = upto_us
        billed_us = use.billed_us * taken_us // use.used_us if use.used_us else use.billed_us
        here[tenant] = Use(taken_us, billed_us)
        if taken_us < use.used_us:
            rest[tenant] = Use(use.used_us - taken_us, use.billed_us - billed_us)
    return here, rest


def _add(into: Uses, more: Mapping[str, Use]) -> None:
    for tenant, use in more.items():
        into.setdefault(tenant, Use()).add(use)


def _total(uses: Iterable[Use]) -> int:
    return sum(use.used_us for use in uses)
