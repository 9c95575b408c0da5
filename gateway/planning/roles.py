"""The roles of a disaggregated function's instances: how many run prompts, and which. Pure.

Decode goes ahead of prefill (BlitzScale §5.4): where instances are short, calls that already stream are
served first, and prompts wait. A change of role loads nothing, so that roles follow the need at once; an
instance keeps its role otherwise, because its calls have their KV cache there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from registry.records.live import InstanceRole


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNeed:
    """The number of instances that each role needs now."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleHolder:
    """A ready instance with the number of its calls."""

    instance_id: str
    calls: int


def assign_roles(
    holders: Sequence[RoleHolder], present: Mapping[str, InstanceRole], need: RoleNeed
) -> dict[str, InstanceRole]:
    """Return the role of each instance; none where one instance is all there is: it does both.

    `present` are the roles until now, by id. What is left over decodes: there calls end sooner.
    """
    if len(holders) < 2:
        return {}
    prefill = _prefill_count(len(holders), need)
    # Of those that change, the ones with the fewest calls: these stay there until they end.
    ranked = sorted(holders, key=lambda one: (one.calls, one.instance_id))
    keep = [one for one in ranked if present.get(one.instance_id) is InstanceRole.PREFILL]
    fresh = [one for one in ranked if one.instance_id not in present]
    decoding = [one for one in ranked if present.get(one.instance_id) is InstanceRole.DECODE]
    chosen = {one.instance_id for one in [*reversed(keep), *fresh, *decoding][:prefill]}
    return {
        one.instance_id: InstanceRole.PREFILL if one.instance_id in chosen else InstanceRole.DECODE
        for one in holders
    }


def _prefill_count(instances: int, need: RoleNeed) -> int:
    """Return how many of at least two instances run prompts; each role has one at least."""
    left = instances - max(1, need.decode)
    return max(1, min(max(1, need.prefill), left))
