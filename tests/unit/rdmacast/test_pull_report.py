"""What nodes report of their pulls, and verdicts on slow nodes, on the wire."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacast.errors import ProtocolError
from rdmacast.protocol.pull_report import (
    MAX_ENDED,
    MAX_NODES,
    MAX_OPEN,
    MAX_PLANS,
    MAX_REPORT_BYTES,
    MAX_SLOW,
    PullReport,
    StragglerVerdict,
    TimedPull,
)

NODES = st.integers(0, MAX_NODES - 1)
SLOW = st.lists(NODES, max_size=MAX_SLOW).map(tuple)
PULLS = st.builds(
    TimedPull, source=NODES, started_us=st.integers(0, 2**63), duration_us=st.integers(0, 2**32 - 1)
)
REPORTS = st.builds(
    PullReport,
    cast=st.text("abc 019-", min_size=1, max_size=128),
    node=NODES,
    plan=st.integers(0, MAX_PLANS),
    slow=SLOW,
    block_us=st.integers(0, 2**32 - 1),
    clock_us=st.integers(0, 2**63),
    ended=st.lists(PULLS, max_size=MAX_ENDED).map(tuple),
    pending=st.lists(PULLS, max_size=MAX_OPEN).map(tuple),
)


@given(REPORTS)
def test_reports_travel(report: PullReport) -> None:
    raw = report.encode()
    assert len(raw) <= MAX_REPORT_BYTES and PullReport.decode(raw) == report


@given(st.builds(StragglerVerdict, plan=st.integers(0, MAX_PLANS), slow=SLOW))
def test_verdicts_travel(verdict: StragglerVerdict) -> None:
    assert StragglerVerdict.decode(verdict.encode()) == verdict


@given(REPORTS, st.data())
def test_damaged_ones_are_refused_or_are_others(report: PullReport, data: st.DataObject) -> None:
    for raw, decode in (
        (report.encode(), PullReport.decode),
        (StragglerVerdict(plan=1, slow=(1, 2)).encode(), StragglerVerdict.decode),
    ):
        damaged = bytearray(raw[: data.draw(st.integers(0, len(raw)))])
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
        try:
            decode(bytes(damaged)).encode()
        except ProtocolError:
            pass


def test_what_breaks_a_bound_is_refused() -> None:
    pull = TimedPull(source=1, started_us=0, duration_us=0)
    for report in (
        PullReport(cast="", node=0, plan=0),
        PullReport(cast="c" * 129, node=0, plan=0),
        PullReport(cast="\n", node=0, plan=0),
        PullReport(cast="c", node=0, plan=0, ended=(pull,) * (MAX_ENDED + 1)),
        PullReport(cast="c", node=0, plan=0, pending=(pull,) * (MAX_OPEN + 1)),
        PullReport(cast="c", node=0, plan=0, slow=(1,) * (MAX_SLOW + 1)),
    ):
        with pytest.raises(ProtocolError):
            report.encode()
    for raw in (b"", b"\1" + PullReport(cast="c", node=0, plan=0).encode()[1:], b"\xff" * 24):
        with pytest.raises(ProtocolError):
            PullReport.decode(raw)
    with pytest.raises(ProtocolError):
        PullReport.decode(PullReport(cast="c", node=MAX_NODES, plan=0).encode())
    for plan in (MAX_PLANS + 1, 2**32 - 1):  # a lie, after which no true one could come
        with pytest.raises(ProtocolError):
            PullReport.decode(PullReport(cast="c", node=0, plan=plan).encode())
        with pytest.raises(ProtocolError):
            StragglerVerdict.decode(StragglerVerdict(plan=plan, slow=(1,)).encode())
    long = TimedPull(source=1, started_us=0, duration_us=1 << 40)
    assert (
        PullReport.decode(PullReport(cast="c", node=0, plan=0, ended=(long,)).encode()).ended[0].duration_us
        > 0
    )
