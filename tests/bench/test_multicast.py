"""The multicast benchmark: its options, what it makes of times, and (as root) a small run of it."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.harness.crew import Crew, CrewError
from benchmarks.harness.crew_messages import MemberHello, encode
from benchmarks.harness.processor import ProcessorTimes
from benchmarks.harness.records import Recording
from benchmarks.multicast import command as multicast
from benchmarks.multicast.copies import COPIES
from benchmarks.multicast.messages import (
    PROTOCOL,
    CastFinished,
    ImageReady,
    MulticastTask,
    StartCast,
    block_bytes,
)
from benchmarks.multicast.records import (
    RunSetting,
    best_of,
    first_pipeline_s,
    link_record,
    plan_of,
    plot,
    record,
    show,
)
from benchmarks.multicast.run import CastRun, MulticastContender, to_cast_run
from benchmarks.testbed.link_rate import LinkMeasurement
from benchmarks.testbed.network import unavailable_reason

USED = ProcessorTimes(busy_s=0.5, idle_s=1.5, stolen_s=0.0)
MIB = 1 << 20


@pytest.fixture
def crew(tmp_path: Path) -> Crew:
    """Return a crew without processes: records need none."""
    crew = Crew("ours", tmp_path / "socket", PROTOCOL, 3)
    crew.close()
    return crew


def run(*complete_s: float, arrived_s: Sequence[Sequence[float]] = ()) -> CastRun:
    return CastRun(complete_s=complete_s, used=USED, own_cpu_s=0.25, arrived_s=tuple(map(tuple, arrived_s)))


def setting(slow: dict[int, float] | None = None) -> RunSetting:
    return RunSetting(nodes=3, nbytes=4 * MIB, limit_s=1.0, slow=slow or {})


def test_options_are_lists_with_units() -> None:
    args = multicast.parse(
        ["--nodes", "2,4,8", "--sources", "1,2", "--size", "16MiB", "--rate", "1gbit", "--peers", ""]
    )
    assert (args.nodes, args.sources, args.size, args.rate) == ([2, 4, 8], [1, 2], 16 * MIB, 125_000_000)
    assert args.peers == []
    assert args.planner == ["binomial", "chain", "tree"]
    assert args.mpi_algorithms == ["9", "8", "3", "5", "2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--planner", "chian"], "unknown value chian: choose one or more of binomial"),
        (["--peers", "nccl"], "choose one or more of gloo, mpi, nixl"),
        (["--nodes", "1"], "must be 2 or more"),
        (["--nodes", "2", "--sources", "2,4"], "no target would receive anything"),
        (["--rate", "fast"], "use a number and a unit"),
        (["--straggler", "2"], "must be at most 1"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        multicast.parse(options)
    assert message in capsys.readouterr().err


def test_blocks_are_whole_units() -> None:
    assert block_bytes(128 * MIB, 128) == MIB
    assert block_bytes(128 * MIB, 100) == 6 << 18  # 86 blocks: 6 units each, the last has 2
    assert block_bytes(MIB, 64) == 1 << 18
    assert block_bytes(1, 4) == 1 << 18


def test_times_count_from_the_first_process_that_begins() -> None:
    done = [
        CastFinished(started_s=10.0, ended_s=10.0),
        CastFinished(
            started_s=10.5, ended_s=13.0, arrived_s=[11.0, 13.0], transports={"tcp": 2}, faults={"late": 1}
        ),
        CastFinished(started_s=10.1, ended_s=12.0, arrived_s=[12.0, 11.5], transports={"tcp": 1, "shm": 1}),
    ]
    cast_run = to_cast_run(done, 1, USED, 0.25)
    assert cast_run.complete_s == (3.0, 2.0)
    assert (cast_run.seconds, cast_run.first_full_s, cast_run.skew_s) == (3.0, 2.0, 1.0)
    assert cast_run.arrived_s == ((1.0, 3.0), (2.0, 1.5))
    assert cast_run.transports == {"tcp": 3, "shm": 1}
    assert cast_run.faults == {"late": 1}


def test_a_record_has_medians_beside_the_limit(crew: Crew) -> None:
    contender = MulticastContender("gloo", crew, 3)
    row = record(contender, [run(1.0, 2.0), run(3.0, 4.0), run(2.5, 3.0)], setting())
    assert row["name"] == "gloo"
    assert row["params"] == {"nodes": 3, "sources": 1}
    assert row["seconds"] == [2.0, 4.0, 3.0]
    assert (row["median_s"], row["ratio_to_limit"]) == (3.0, 3.0)
    assert (row["first_full_s"], row["skew_s"]) == (2.5, 1.0)
    assert row["bytes_per_cpu_s"] == 2 * 4 * MIB / 0.5
    assert row["bytes_per_own_cpu_s"] == 2 * 4 * MIB / 0.25
    assert row["processor_share"] == 0.25
    assert "simulated_s" not in row


def test_a_planners_record_tells_what_was_planned(crew: Crew) -> None:
    task = MulticastTask(planner="chain", blocks=4, sources=1, window=3)
    arrived_s = [[0.25, 0.5, 0.75, 1.0], [0.5, 0.75, 1.0, 1.25]]
    row = record(MulticastContender("chain", crew, 3, task), [run(1.0, 1.25, arrived_s=arrived_s)], setting())
    assert row["params"]["blocks"] == 4
    assert row["simulated_s"] == pytest.approx(1.25)
    assert row["first_pipeline_s"] == 1.0
    arrivals = row["block_quantiles_s"]
    assert (arrivals[0], arrivals[50], arrivals[-1]) == (0.25, 0.75, 1.25)
    assert "chain" in show(row) and "1.25 x limit" in show(row)


def test_a_straggler_is_told_from_the_others(crew: Crew) -> None:
    row = record(MulticastContender("gloo", crew, 3), [run(1.0, 4.0)], setting(slow={2: 0.25}))
    assert (row["median_s"], row["others_s"]) == (4.0, 1.0)


def test_subgroups_form_a_pipeline_once_each_has_its_own_chunk() -> None:
    plan = plan_of(MulticastTask(planner="chain", blocks=4, sources=2, window=3), nodes=6, nbytes=4 * MIB)
    first, second = ([node for node in group if node >= 2] for group in plan.groups)
    assert (first, second) == ([2, 3], [4, 5])
    # Sub-group 0 begins with blocks 0 and 1, sub-group 1 with 2 and 3.
    arrived_s = [[1.0, 2.0, 9.0, 9.0], [1.5, 2.5, 9.0, 9.0], [9.0, 9.0, 1.0, 3.0], [9.0, 9.0, 2.0, 2.5]]
    assert first_pipeline_s(plan, arrived_s) == 2.5


def test_of_mpi_the_best_algorithm_counts(crew: Crew) -> None:
    rows = [
        record(MulticastContender("mpi", crew, 3, algorithm=name), [run(seconds)], setting())
        for name, seconds in (("9: ring", 2.0), ("2: chain", 5.0))
    ]
    best = best_of(rows)
    assert best["params"]["algorithm"] == "9: ring"
    assert best["algorithms"] == {"9: ring": 2.0, "2: chain": 5.0}


def test_the_link_has_a_record_and_all_are_drawn(crew: Crew, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    copies = [LinkMeasurement(nbytes=4 * MIB, seconds=seconds) for seconds in (1.0, 1.1, 1.2)]
    link = link_record(copies, setting())
    assert (link["median_s"], link["bytes_per_s"]) == (1.1, 4 * MIB)
    gloo = record(MulticastContender("gloo", crew, 3), [run(2.0, 3.0)], setting())
    plot([link, gloo], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_crew_of_processes_that_do_not_come_is_given_up(tmp_path: Path) -> None:
    with subprocess.Popen(["false"]) as ended:
        ended.wait()
        with (
            Crew("ours", tmp_path / "socket", PROTOCOL, 1) as crew,
            pytest.raises(CrewError, match="ended with 1"),
        ):
            crew.gather([ended], 30.0)


def test_a_crew_takes_orders_together(tmp_path: Path) -> None:
    answers = [
        b"".join(
            encode(answer) + b"\n"
            for answer in (MemberHello(rank=rank), ImageReady(), CastFinished(started_s=0, ended_s=rank))
        )
        for rank in (1, 0)
    ]
    path = tmp_path / "socket"
    script = (
        "import socket,sys; s=socket.socket(1); s.connect(sys.argv[1]); orders=s.makefile('rb')\n"
        "for answer in sys.argv[2].splitlines(True): s.sendall(answer.encode()); orders.readline()"
    )
    with ExitStack() as stack:
        crew = stack.enter_context(Crew("ours", path, PROTOCOL, 2))
        members = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", script, str(path), text.decode()]))
            for text in answers
        ]
        crew.gather(members, 60.0)
        assert [hello.rank for hello in crew.hellos] == [0, 1]
        assert len(crew.ask(StartCast(), ImageReady, 60.0)) == 2
        assert [done.ended_s for done in crew.ask(StartCast(), CastFinished, 60.0)] == [0, 1]
        crew.close()


def test_casts_over_links_are_measured_and_checked() -> None:
    reason = unavailable_reason()
    if reason:
        pytest.skip(f"no testbed here: {reason}")
    options = "--nodes 3 --sources 1,2 --size 2MiB --rate 100mbit --planner chain,auto --blocks 4 --repeat 1"
    args = multicast.parse([*shlex.split(options), "--peers", ""])
    out = Recording()
    multicast.measure(args, out)
    rows = out.records
    assert [row["name"] for row in rows] == ["link", "chain", "auto", "chain", "auto"]
    for row in rows[1:]:
        assert set(row["transports"]) == {"tcp"}
        assert row["median_s"] > 0


def test_casts_in_shared_memory_are_measured_beside_copies() -> None:
    options = "--transport shm --nodes 3 --size 2MiB --planner chain --blocks 4 --repeat 1"
    args = multicast.parse([*shlex.split(options), "--links", "kept,fresh,apart"])
    out = Recording()
    multicast.measure(args, out)
    ours, copies = out.records[:3], out.records[3:]
    assert [row["name"] for row in ours] == ["chain", "chain-fresh", "chain-apart"]
    assert all(set(row["transports"]) == {"shm"} for row in ours)
    assert [row["name"] for row in copies] == ["copy", "copy-checked", "read-checked"]
    assert min(row["ratio_to_limit"] for row in copies[1:]) == 1.0


def test_plain_copies_are_the_limit_of_fresh_links_too(crew: Crew) -> None:
    args = multicast.parse(["--transport", "shm", "--planner", "chain", "--links", "fresh"])
    assert [one.name for one in multicast.hypercast_contenders(crew, 3, args)] == ["chain-fresh"]
    assert [one.name for one in multicast.copy_contenders(crew, 3, args)] == list(COPIES)
