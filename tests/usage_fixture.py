"""What a ledger may hold, in times from one moment on, for tests of usage reports."""

from dataclasses import replace

from registry.memory_state import MemoryState
from registry.usage import CallPart, GpuSlice, InstanceInterval, LostCall, RequestRecord
from tests.registry_records import request

NOW = 1_700_000_000.0


def interval(name: str = "i0", start: float = 0.0, end: float = 60.0, **changes: object) -> InstanceInterval:
    """The first of an instance, idle for all of its time unless told otherwise; with `calls` it was busy
    for these."""
    if "calls" in changes:
        changes = {"busy_us": sum(one.used_us for one in changes["calls"])} | changes  # type: ignore[attr-defined]
    times = {key: int(changes.pop(key, 0)) for key in ("busy_us", "loading_us")}  # type: ignore[call-overload]
    idle_us = round((end - start) * 1e6) - sum(times.values())
    record = InstanceInterval(
        instance_id=name,
        function="tiny",
        version=1,
        node="n0",
        state="ready",
        from_at=NOW + start,
        to_at=NOW + end,
        gpu_count=1,
        idle_us=idle_us,
        epoch=1,
        earlier_us=0,
        **times,
    )
    return replace(record, **changes)


def part(call: str, start_us: int, end_us: int, *, over: bool = False) -> CallPart:
    return CallPart(call_id=call, from_us=start_us, to_us=end_us, over=over)


def us(at: float) -> int:
    return round((NOW + at) * 1e6)


def used(gpu_us: int, call: str = "r0/0", name: str = "i0", node: str = "n0") -> GpuSlice:
    return GpuSlice(call_id=call, instance_id=name, node=node, gpu_us=gpu_us)


def done(
    name: str, *slices: GpuSlice, start: float = 0.0, end: float = 10.0, **changes: object
) -> RequestRecord:
    return request(
        name,
        gpu=slices,
        billed_gpu_ms=-(-sum(part.gpu_us for part in slices) // 1000),
        started_at=NOW + start,
        ended_at=NOW + end,
        **changes,
    )


def lost(call: str, used_us: int, name: str = "i0", at: float = 10.0, **changes: object) -> LostCall:
    call_record = LostCall(
        id=f"{call}@{name}",
        call_id=call,
        instance_id=name,
        node="n0",
        function="tiny",
        version=1,
        used_us=used_us,
        ended_at=NOW + at,
    )
    return replace(call_record, **changes)


def ledger() -> tuple[list[RequestRecord], list[InstanceInterval], list[LostCall]]:
    """Two instances that share a node for a minute, and one elsewhere; every microsecond accounted for."""
    ends = tuple(
        part(call, 0, end_us, over=True)
        for call, end_us in (("b/0", 4_000_103), ("c/0", 2_000_020), ("e/0", 1_000_000))
    )
    intervals = [
        interval("i0", 0, 30, busy_us=0, loading_us=2_000_000, idle_us=13_000_000),
        interval(
            "i1", 0, 30, calls=(part("a/0", 0, 5_000_000),), idle_us=10_000_000, function="big", final=True
        ),
        interval("i0", 30, 90, calls=ends, final=True, earlier_us=15_000_000),
        interval("i2", 0, 60, calls=(part("b/0+1", 0, 1_000_001),), node="n1", final=True),
    ]
    requests = [
        done("a", used(5_000_000, "a/0", "i1"), function="big", start=5, end=15),
        done("b", used(4_000_100, "b/0", "i0"), used(1_000_001, "b/0+1", "i2", "n1"), start=31, end=59),
        done("c", used(2_000_020, "c/0", "i0"), tenant="other", start=40, end=50),
        done("d", used(0, "d/0", "i0"), tenant="other", start=40, end=41),
    ]
    calls = [lost("e/0", 1_000_000, at=70), lost("b/0", 4_000_103, at=55)]
    return requests, intervals, calls


async def fill(state: MemoryState) -> None:
    """Two tenants on one instance that was busy for 7 s of a minute, one of them lost."""
    for record in (
        done("a", used(4_000_000, "a/0"), tenant="acme", start=5, end=15),
        done("b", used(2_000_400, "b/0"), tenant="other", start=20, end=30),
    ):
        await state.add_request(record)
    calls = part("a/0", 0, 4_000_000), part("b/0", 0, 2_000_400), part("c/0", 0, 1_000_000)
    await state.add_interval(interval(calls=calls, loading_us=1_000_000, final=True))
    await state.add_lost_call(lost("c/0", 1_000_000, at=40))
