"""The testbed of network namespaces: its plan, its owner, and (as root) what its links carry."""

import os
import re
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.harness.owner import Owner, is_orphaned, owner_for_pid, owner_of, scratch_folder
from benchmarks.harness.processor import ProcessorTimes, processor_times, read_times, saturated_share
from benchmarks.multicast.peers import agent_script, mpirun

# Not by name: pytest takes classes of the name Test… for tests.
from benchmarks.testbed import network as beds
from benchmarks.testbed import plan as plans
from benchmarks.testbed.link_meter import LinkMeter, port_counters
from benchmarks.testbed.network import sweep, unavailable_reason
from benchmarks.testbed.plan import LinkShape
from tests.fixtures.patience import PATIENCE_S

OWNER = Owner(41, 7)
SHAPE = LinkShape(rate_bytes_s=25_000_000)
# No process has this number.
NOBODY = Owner(1 << 30, 1)


def plan(hosts: int = 3, shape: LinkShape = SHAPE) -> plans.TestbedPlan:
    return plans.TestbedPlan(hosts=hosts, shape=shape, owner=OWNER)


def test_every_host_is_joined_to_the_switch_and_shaped_both_ways() -> None:
    commands = [" ".join(command) for command in plan().commands()]
    for host, name in enumerate(("hcbed-41-7-h0", "hcbed-41-7-h1", "hcbed-41-7-h2")):
        shaped = "root handle 1: tbf rate 200000000bit burst 524288b latency 50ms"
        assert f"ip netns add {name}" in commands
        assert f"tc -n {name} qdisc add dev eth0 {shaped}" in commands
        assert f"tc -n hcbed-41-7-switch qdisc add dev p{host} {shaped}" in commands
        assert f"ip -n {name} address add 10.77.0.{host + 1}/24 dev eth0" in commands
    assert all(len(f"p{host}") <= 15 for host in range(250))


def test_urgent_bytes_have_a_band_of_their_own() -> None:
    shape = LinkShape(rate_bytes_s=25_000_000, bands=True)
    commands = [" ".join(command) for command in plan(shape=shape).commands()]
    assert "ip -n hcbed-41-7-h0 link set eth0 gso_max_segs 1 txqueuelen 64" in commands
    assert "tc -n hcbed-41-7-switch qdisc add dev p2 parent 1:1 pfifo_fast" in commands


def test_bands_become_one_queue_and_back() -> None:
    banded = plan(shape=LinkShape(rate_bytes_s=25_000_000, bands=True))
    queued = [" ".join(command) for command in banded.set_bands(False)]
    assert "tc -n hcbed-41-7-h0 qdisc replace dev eth0 parent 1:1 pfifo limit 64" in queued
    assert "tc -n hcbed-41-7-switch qdisc replace dev p2 parent 1:1 pfifo limit 64" in queued
    assert len(queued) == 6
    assert all(command[-1] == "pfifo_fast" for command in banded.set_bands(True))
    with pytest.raises(ValueError, match="no bands"):
        plan().set_bands(True)


def test_a_switch_that_heeds_bands_routes() -> None:
    """A bridge forgets on the way how urgent a packet is."""
    banded = plan(shape=LinkShape(rate_bytes_s=25_000_000, bands=True))
    commands = [" ".join(command) for command in banded.commands()]
    assert not any("bridge" in command or "master" in command for command in commands)
    assert "ip -n hcbed-41-7-switch route add 10.77.0.3/32 dev p2" in commands
    through = "10.77.0.0/24 via 10.77.255.254 dev eth0 src 10.77.0.3 congctl cubic"
    assert f"ip -n hcbed-41-7-h2 route replace {through}" in commands


def test_leaf_switches_have_shaped_uplinks_to_a_spine() -> None:
    spine = plans.Spine(leaf_of=(0, 1, 1), rate_bytes_s=12_500_000)
    made = plans.TestbedPlan(hosts=3, shape=SHAPE, owner=OWNER, spine=spine)
    commands = [" ".join(command) for command in made.commands()]
    switch = "ip -n hcbed-41-7-switch link"
    for host, leaf in enumerate((0, 1, 1)):
        assert f"{switch} set p{host} master br{leaf} up" in commands
    for leaf in (0, 1):
        assert f"{switch} set up{leaf} master br{leaf} up" in commands
        assert f"{switch} set down{leaf} master spine up" in commands
        for end in (f"up{leaf}", f"down{leaf}"):
            shaped = "root handle 1: tbf rate 100000000bit burst 524288b latency 50ms"
            assert f"tc -n hcbed-41-7-switch qdisc add dev {end} {shaped}" in commands
    assert [command[-1] for command in made.spine_bytes()] == ["up0", "up1"]
    assert plan().spine_bytes() == []


@pytest.mark.parametrize(
    ("leaf_of", "shape", "words"),
    [
        ((0, 0, 2), SHAPE, "each of the leaves 0 to 2 needs a host"),
        ((0, 1), SHAPE, "2 hosts have a leaf, of 3"),
        ((0, 1, 1), LinkShape(rate_bytes_s=1, bands=True), "bands"),
    ],
)
def test_a_spine_that_cannot_be_is_refused(leaf_of: tuple[int, ...], shape: LinkShape, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plans.TestbedPlan(
            hosts=3, shape=shape, owner=OWNER, spine=plans.Spine(leaf_of=leaf_of, rate_bytes_s=1)
        )


@pytest.mark.parametrize("bands", [False, True])
def test_nothing_is_made_outside_of_the_testbeds_own_namespaces(bands: bool) -> None:
    made = plan(shape=LinkShape(rate_bytes_s=25_000_000, bands=bands))
    for command in made.commands():
        place = 3 if command[2] == "exec" else 2
        where = command[place] if command[1] in ("-n", "netns") else ""
        assert where == "add" or where in made.namespaces, command


def test_a_host_can_have_a_share_of_the_rate() -> None:
    shape = LinkShape(rate_bytes_s=25_000_000, shares={2: 0.25})
    assert [plan(shape=shape).shape.rate_bit_s(host) for host in range(3)] == [200_000_000] * 2 + [50_000_000]


@pytest.mark.parametrize("hosts", [0, 251])
def test_a_number_of_hosts_that_has_no_addresses_is_refused(hosts: int) -> None:
    with pytest.raises(ValueError, match="1 to 250"):
        plan(hosts)


def test_what_cannot_be_a_link_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        LinkShape(rate_bytes_s=0)
    with pytest.raises(ValueError, match="share"):
        LinkShape(rate_bytes_s=1, shares={0: 1.5})
    with pytest.raises(ValueError, match="host 3 does not exist"):
        plan().address(3)


def test_names_tell_their_owner() -> None:
    assert [owner_of(name) for name in plan().namespaces] == [OWNER] * 4
    assert owner_of("somebody-else-41-7-h0") is None
    assert owner_for_pid(os.getpid()).is_alive
    assert is_orphaned(NOBODY.name("h0"))
    assert not is_orphaned(owner_for_pid(os.getpid()).name("h0"))
    assert not is_orphaned("docker0")


def test_a_later_process_of_the_same_number_is_another_owner() -> None:
    here = owner_for_pid(os.getpid())
    assert is_orphaned(Owner(here.pid, here.started - 1).name("switch"))


def test_a_folder_goes_at_the_end_and_so_do_those_of_killed_runs(tmp_path: Path) -> None:
    left, kept = tmp_path / NOBODY.name("files"), tmp_path / "another"
    for folder in (left, kept):
        folder.mkdir()
        (folder / "file").touch()
    with scratch_folder(tmp_path) as folder:
        (folder / "image").touch()
        assert not left.exists()
    assert list(tmp_path.iterdir()) == [kept]


def test_processor_time_is_read_from_the_kernel() -> None:
    assert read_times().busy_s > 0
    times = ProcessorTimes(busy_s=1.7, idle_s=8.4, stolen_s=0.2)
    later = ProcessorTimes(busy_s=2.7, idle_s=9.2, stolen_s=0.4)
    assert later.since(times).share == pytest.approx(0.6)  # stolen time is not there for other work


def test_stolen_and_interrupt_time_is_busy_and_guests_count_once() -> None:
    kernel = {"user": 10.0, "nice": 1.0, "system": 2.0, "irq": 0.5, "softirq": 0.5, "guest": 4.0}
    now = SimpleNamespace(**kernel, guest_nice=1.0, idle=5.0, iowait=1.0, steal=3.0)
    found = processor_times(now)
    assert (found.busy_s, found.idle_s, found.stolen_s) == (14.0, 6.0, 3.0)
    assert found.share == pytest.approx(17 / 23)
    assert found.since(found).share == 0.0


def test_seconds_without_processor_time_left_are_counted() -> None:
    busy_s = (0.0, 2.0, 3.0, 4.95, 6.95)
    reads = [ProcessorTimes(busy_s=b, idle_s=2.0 * n - b, stolen_s=0.0) for n, b in enumerate(busy_s)]
    assert saturated_share(reads) == 0.75
    assert saturated_share(reads[:1]) == 0.0


def test_counters_of_interfaces_are_told_from_each_other() -> None:
    zeros = "0 0 0 0 0 0"
    ports = ("lo", 100, 200), ("p12", 12345678, 87654321)
    lines = [f"{name:>6}:{received:8} 1 {zeros} {sent} 1 {zeros}" for name, received, sent in ports]
    text = "\n".join(["Inter-| Receive | Transmit", " face |bytes packets", *lines])
    assert port_counters(text) == {"lo": (100, 200), "p12": (12345678, 87654321)}


def test_mpirun_is_led_to_the_namespaces() -> None:
    command = mpirun(plan(), 2, Path("agent"), "9", Path("socket"))
    assert command[command.index("--host") + 1] == "10.77.0.1:1,10.77.0.2:1"
    assert command[command.index("coll_tuned_bcast_algorithm") + 1] == "9"
    script = agent_script(plan())
    assert "10.77.0.3) namespace=hcbed-41-7-h2 ;;" in script
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0


def test_without_its_rights_a_testbed_says_what_it_needs(root: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.testbed", "--hosts", "2"]
    if not unavailable_reason():
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv, which takes rights away, is not installed")
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 1
    assert re.search("need root|iproute2|of Linux", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.fixture
def possible() -> None:
    reason = unavailable_reason()
    if reason:
        pytest.skip(f"no testbed here: {reason}")


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("bands", [False, True])
def test_links_have_their_rate_and_nothing_is_left_behind(bands: bool) -> None:
    with beds.Testbed(2, LinkShape(rate_bytes_s=2_500_000, bands=bands)) as testbed:
        names = testbed.plan.namespaces
        # 2 MiB less the burst of half a MiB take 0.63 s at 20 Mbit/s; unshaped they would take a millisecond.
        with LinkMeter(testbed.plan) as meter:
            rate = testbed.link_rate(0, 1, 2 << 20)
        assert rate.nbytes == 2 << 20
        assert rate.seconds > 0.5
        first, *_, last = meter.samples
        assert 2 << 20 <= last.received[1] - first.received[1] < 1.2 * (2 << 20)
        assert last.sent[0] - first.sent[0] == pytest.approx(last.received[1] - first.received[1], rel=0.1)
        assert last.received[0] - first.received[0] < 0.1 * (2 << 20)
        assert len(meter.samples) > 3
        testbed.start(1, ["sleep", "600"])
    output = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not set(names) & set(output.split())


@pytest.mark.usefixtures("possible")
def test_what_a_killed_run_left_is_swept() -> None:
    script = (
        "import signal, subprocess\n"
        "from benchmarks.testbed.network import Testbed\n"
        "from benchmarks.testbed.plan import LinkShape\n"
        "testbed = Testbed(1, LinkShape(rate_bytes_s=1000)); testbed.__enter__()\n"
        "command = ['sh', '-c', 'echo $$; exec sleep 600']\n"  # it is on the host once it says so
        "left = int(testbed.start(0, command, stdout=subprocess.PIPE).stdout.readline())\n"
        "print(left, testbed.plan.switch, testbed.plan.namespace(0), flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        pid, *names = killed.stdout.readline().split()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert set(names) <= set(sweep())
    with suppress(ProcessLookupError):  # it is gone already
        left = os.pidfd_open(int(pid))
        ended, _, _ = select.select([left], [], [], PATIENCE_S)
        os.close(left)
        assert ended
