"""The meter's journal: adopted once, restarted before it grows, and missing while the disk is full."""

import os
from pathlib import Path

from invoker.metering.journal import MIN_ROTATION, MeterJournal, discard_recovered, recover_journals
from invoker.metering.meter import GpuMeter
from invoker.metering.replay import replay
from registry.records.instance import InstanceState
from tests.fixtures.meter import ORIGIN_S


def _meter(folder: Path, epoch: int, now_us: list[int]) -> tuple[GpuMeter, MeterJournal]:
    journal, adopted = MeterJournal(folder, "n0", epoch), recover_journals(folder)
    dues = [record for one in adopted for record in one.records]
    meter = GpuMeter("n0", epoch, lambda: now_us[0], ORIGIN_S, journal, dues)
    discard_recovered(adopted, journal)
    return meter, journal


def test_a_journal_is_adopted_once_and_only_when_its_process_is_gone(tmp_path: Path) -> None:
    now = [0]
    first, journal = _meter(tmp_path, 1, now)
    call = first.open_call(first.open_account("i", "f", 1, InstanceState.READY), "r/0")
    first.occupy(call)
    now[0] = 700
    first.vacate(call)
    now[0] = 900  # nothing is written of these
    assert recover_journals(tmp_path) == []
    journal.close(remove=False)  # as the kernel does at the end of a process
    _, heir = _meter(tmp_path, 2, now)
    assert [path.name for path in tmp_path.iterdir()] == ["n0.2.journal"]
    heir.close(remove=False)  # it dies as well, before the ledger answered
    (tmp_path / "n0.3.tmp").write_bytes(b"the beginning of a snapshot")
    third, last = _meter(tmp_path, 3, now)
    (_, interval), (_, lost) = third._unsent.items()
    assert (interval.busy_us, interval.idle_us) == (700, 0) and lost.used_us == 700
    assert interval.to_at == ORIGIN_S + 700 / 1e6 and not third.is_settled
    for due in list(third._unsent):
        third.acknowledge(due)
    assert third.is_settled
    last.close(remove=True)
    assert not tmp_path.exists()


def test_a_journal_is_begun_anew_before_it_grows(tmp_path: Path) -> None:
    now = [0]
    meter, journal = _meter(tmp_path, 1, now)
    account = meter.open_account("i", "f", 1, InstanceState.READY)
    calls = [meter.open_call(account, f"r{number}/0") for number in range(64)]
    largest = 0
    for _ in range(8000):
        meter.start_step(account)
        now[0] += 100
        meter.end_step(account, [(call, 1) for call in calls])
        largest = max(largest, journal._size)
    assert largest + 1000 >= MIN_ROTATION and journal.path.stat().st_size < MIN_ROTATION
    state = replay(journal.path.read_bytes())
    assert [call.used_us for call in state.calls.values()] == [call.used_us for call in calls]
    journal.close(remove=True)


def test_a_full_disk_stops_the_journal_and_not_the_node(tmp_path: Path) -> None:
    now = [0]
    meter, journal = _meter(tmp_path / "j", 1, now)
    account = meter.open_account("i", "f", 1, InstanceState.READY)
    before = journal.path.read_bytes()
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._fd)
    os.close(full)
    now[0] = 1000
    meter.end_intervals()
    assert not journal.is_current and journal.path.read_bytes() == before
    journal._retry_s = 0.0  # a second later
    now[0] = 2000
    meter.change_state(account, InstanceState.STOPPED, final=True)
    assert journal.is_current
    assert [one.idle_us for one in replay(journal.path.read_bytes()).unsent_records()] == [1000, 1000]
    journal.close(remove=True)
