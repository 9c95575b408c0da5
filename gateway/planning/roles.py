"""The roles of a disaggregated function's instances: how many run prompts, and which. Pure.

Decode goes ahead of prefill (BlitzScale §5.4): where instances are short, calls that already stream are
served first, and prompts wait. A change of role loads nothing, so that roles follow the need at once; an
instance keeps its role otherwise, because its calls have their KV cache there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from registry.records.live import InstanceRole


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNeed:
    """The number of instances that each role needs now."""

    prefill: int
    decode: int


def assign_roles(
    calls: Mapping[str, int], present: Mapping[str, InstanceRole], need: RoleNeed
) -> dict[str, InstanceRole]:
    """Return the role of each instance; none where one instance is all there is: it does both.

    `calls` are the numbers of calls of ready instances, by id, and `present` the roles until now. Each role
    has an instance at least. Surplus instances decode: there calls end sooner.
    """
    if len(calls) < 2:
        return {}
    prefill = max(1, min(need.prefill, len(calls) - max(1, need.decode)))
    # Of those that change, the ones with the fewest calls: these stay there until they end.
    ranked = sorted(calls, key=lambda id_: (calls[id_], id_))
    keep = [id_ for id_ in ranked if present.get(id_) is InstanceRole.PREFILL]
    fresh = [id_ for id_ in ranked if id_ not in present]
    decoding = [id_ for id_ in ranked if present.get(id_) is InstanceRole.DECODE]
    chosen = {*[*reversed(keep), *fresh, *decoding][:prefill]}
    return {id_: InstanceRole.PREFILL if id_ in chosen else InstanceRole.DECODE for id_ in calls}
