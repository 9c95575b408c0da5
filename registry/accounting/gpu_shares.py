"""Attribution of an interval's busy time: to a tenant, to lost calls, or to calls in flight. Pure.

Interval and record name the same call; the record's usage covers the call's first microseconds, so that each
part of them follows from one interval and one record alone, and no clocks are compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from registry.records.usage import CallPart, InstanceInterval, RequestRecord


@dataclass(slots=True)
class GpuUse:
    """Used and billed (rounded up) accelerator time, in microseconds."""

    used_us: int = 0
    billed_us: int = 0


@dataclass(slots=True)
class BusyShares:
    """The busy time of one interval. `open_us` belongs to calls without a record, which are in flight."""

    tenants: dict[str, GpuUse] = field(default_factory=dict)
    lost_us: int = 0
    open_us: int = 0


def share_busy_time(
    interval: InstanceInterval,
    records: Mapping[tuple[str, str], RequestRecord],
    lost_us: Mapping[tuple[str, str], int],
) -> BusyShares:
    """Attribute the interval's busy time.

    `records` are those of its calls, `lost_us` is the usage in LostCalls; both by call and instance.
    """
    found = BusyShares()
    known_us = 0
    for part in interval.calls:
        name = part.call_id, interval.instance_id
        record = records.get(name)
        upto_us = 0
        if record is not None:
            use, upto_us = _recorded(record, part, interval.instance_id)
            if use.used_us or use.billed_us:
                sums = found.tenants.setdefault(record.tenant, GpuUse())
                sums.used_us += use.used_us
                sums.billed_us += use.billed_us
                known_us += use.used_us
        end_us = min(part.to_us, lost_us.get(name, 0))
        found.lost_us += max(0, end_us - max(part.from_us, upto_us))
    found.open_us = max(0, interval.busy_us - known_us - found.lost_us)
    return found


def recorded_us(record: RequestRecord, call_id: str, instance_id: str) -> int:
    """Return the microseconds that the record has for the call on the instance."""
    return sum(
        part.gpu_us for part in record.gpu if part.call_id == call_id and part.instance_id == instance_id
    )


def request_id_of(call_id: str) -> str:
    """Return the id of a call's request."""
    return call_id.partition("/")[0]


def _recorded(record: RequestRecord, part: CallPart, instance_id: str) -> tuple[GpuUse, int]:
    """Return the recorded share of the part, and the position at which the record ends."""
    billed_us = record.billed_gpu_ms * 1000
    total_us = sum(one.gpu_us for one in record.gpu)
    use, at_us, done_us = GpuUse(), 0, 0
    for one in record.gpu:
        if one.call_id == part.call_id and one.instance_id == instance_id and one.gpu_us:
            low_us = min(max(part.from_us - at_us, 0), one.gpu_us)
            high_us = min(max(part.to_us - at_us, 0), one.gpu_us)
            use.used_us += high_us - low_us
            # Cumulative over the request, so that its parts add up to what it is billed.
            before_us = billed_us * (done_us + low_us) // total_us
            use.billed_us += billed_us * (done_us + high_us) // total_us - before_us
            at_us += one.gpu_us
        done_us += one.gpu_us
    return use, at_us
