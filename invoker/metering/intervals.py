"""Splits an account's time into ledger intervals with a bounded number of calls (pure)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from invoker.metering.accounts import MeterAccount
from registry.records.usage import CallPart, InstanceInterval

MAX_PARTS = 500  # calls per interval; with more it ends early or is split


def intervals_of(
    node: str, epoch: int, account: MeterAccount, *, to_at: float, final: bool, gpu_count: int = 1
) -> tuple[list[InstanceInterval], list[CallPart]]:
    """Return an account's time from its interval's start to `to_at`, as contiguous intervals.

    Also return parts for a later interval: only calls without usage are left over, since each interval needs
    a call with some. With `final` these are dropped, as there is no later interval.
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
        gpu_count=gpu_count,
        busy_us=account.busy - busy,
        loading_us=account.loading - loading,
        idle_us=account.idle - idle,
        epoch=epoch,
        final=final,
        earlier_us=sum(account.base),
    )
    parts = [
        *account.parts,
        *[call.part() for call in account.using.values() if call.used_us > call.reported_us],
    ]
    if len(parts) <= MAX_PARTS:
        return [replace(whole, calls=tuple(parts))], []
    used = sum(1 for part in parts if part.used_us)
    parts.sort(key=lambda part: not part.used_us)
    # Each interval has a call with usage, and so lasts at least a microsecond.
    count = max(1, min(-(-len(parts) // MAX_PARTS), used))
    named, left = parts[: count * MAX_PARTS], parts[count * MAX_PARTS :]
    return _split(whole, [named[index::count] for index in range(count)]), [] if final else left


def _split(whole: InstanceInterval, groups: Sequence[Sequence[CallPart]]) -> list[InstanceInterval]:
    """Split an interval by groups of calls, in proportion to their busy time."""
    cumulative = list(accumulate(sum(part.used_us for part in group) for group in groups))
    busy_us, length_s = max(1, whole.busy_us), whole.to_at - whole.from_at
    intervals: list[InstanceInterval] = []
    from_at, before_us = whole.from_at, 0
    for group, end_us in zip(groups, cumulative, strict=True):
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
                earlier_us=whole.earlier_us + sum(one.allocated_us for one in intervals),
                calls=tuple(group),
            )
        )
        from_at, before_us = to_at, end_us
    return intervals
