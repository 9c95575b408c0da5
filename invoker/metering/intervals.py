"""The intervals that an account's time is told in: each names few enough calls. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from invoker.meter_accounts import Account
from registry.usage import CallPart, InstanceInterval

MAX_PARTS = 500  # calls that one interval names; with more it ends early, or is told in several


def intervals_of(
    node: str, epoch: int, account: Account, *, to_at: float, final: bool
) -> tuple[list[InstanceInterval], list[CallPart]]:
    """What an account did since its interval began, up to `to_at`, as intervals that follow each other;
    and the settled calls that are still to be named, by a later one.

    Only calls that used none of it are ever left over: one may use a microsecond, and takes its time. With
    `final` there is no later interval, and nobody names them, as if they were settled after it.
    """
    busy, loading, idle = account.base
    whole = InstanceInterval(
        instance_id=account.instance_id,
        function=account.function,
        version=account.version,
        node=node,
        state=account.state,
        from_at=account.from_at,
        to_at=to_at,
        gpu_count=1,
        busy_us=account.busy - busy,
        loading_us=account.loading - loading,
        idle_us=account.idle - idle,
        epoch=epoch,
        final=final,
        earlier_us=sum(account.base),
    )
    parts = [*account.parts, *[call.part() for call in account.using.values() if call.used_us > call.told_us]]
    if len(parts) <= MAX_PARTS:
        return [replace(whole, calls=tuple(parts))], []
    used = sum(1 for part in parts if part.used_us)
    parts.sort(key=lambda part: not part.used_us)
    # Each of the intervals has a call that used some of it, and so lasts at least a microsecond.
    count = max(1, min(-(-len(parts) // MAX_PARTS), used))
    named, left = parts[: count * MAX_PARTS], parts[count * MAX_PARTS :]
    return _split(whole, [named[index::count] for index in range(count)]), [] if final else left


def _split(whole: InstanceInterval, groups: Sequence[Sequence[CallPart]]) -> list[InstanceInterval]:
    """An interval of each group of calls, as long as they were busy; what was not busy is shared so too."""
    upto = list(accumulate(sum(part.used_us for part in group) for group in groups))
    busy_us, length_s = max(1, whole.busy_us), whole.to_at - whole.from_at
    earlier_us = whole.earlier_us or 0
    intervals: list[InstanceInterval] = []
    from_at, before_us = whole.from_at, 0
    for group, end_us in zip(groups, upto, strict=True):
        last = len(intervals) == len(groups) - 1
        to_at = whole.to_at if last else whole.from_at + length_s * end_us / busy_us
        loading, idle = (us if last else us * end_us // busy_us for us in (whole.loading_us, whole.idle_us))
        intervals.append(
            replace(
                whole,
                from_at=from_at,
                to_at=to_at,
                busy_us=end_us - before_us,
                loading_us=loading - sum(one.loading_us for one in intervals),
                idle_us=idle - sum(one.idle_us for one in intervals),
                final=whole.final and last,
                earlier_us=earlier_us + sum(one.allocated_us for one in intervals),
                calls=tuple(group),
            )
        )
        from_at, before_us = to_at, end_us
    return intervals
