"""A host that loses its power: no RST, no FIN, only silence. Over real links, which need root."""

import time
from pathlib import Path

import pytest

from benchmarks.multicast.messages import (
    CastFinished,
    DigestReport,
    ImageReady,
    MulticastTask,
    NodeEndpoint,
    PrepareImage,
    ReportDigest,
    StartCast,
)
from benchmarks.multicast.ours import on_hosts
from benchmarks.multicast.run import CastImage
from benchmarks.testbed import network as beds
from benchmarks.testbed.plan import LinkShape
from rdmacast.settings import LinkSettings

NODES, RELAY = 5, 2
MIB = 1 << 20
RATE = 4 * MIB
GIVEN = 1 * MIB  # before the cut: on a busy machine a relay may be found slow after more, and give nothing
HANGS_S = 300.0  # an answer later than this never comes


@pytest.fixture
def possible() -> None:
    reason = beds.unavailable_reason()
    if reason:
        pytest.skip(f"no testbed here: {reason}")


@pytest.mark.usefixtures("possible")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("planner", ["chain", "binomial"])
def test_the_others_finish_when_the_link_of_a_relay_goes_down(planner: str, tmp_path: Path) -> None:
    image = CastImage.make(24 * MIB, 3)
    others = [rank for rank in range(1, NODES) if rank != RELAY]
    with (
        beds.Testbed(NODES, LinkShape(rate_bytes_s=RATE)) as testbed,
        on_hosts(testbed, NODES, tmp_path) as crew,
    ):
        order = PrepareImage(
            nbytes=image.nbytes,
            seed=image.seed,
            cast="c",
            task=MulticastTask(planner=planner, blocks=48, sources=1, window=3, link_bytes_s=RATE),
            nodes=[NodeEndpoint(url=hello.url, host=hello.host) for hello in crew.hellos],
            units=image.units,
        )
        crew.ask(order, ImageReady, HANGS_S)
        crew.send(StartCast())
        went_s = time.monotonic()
        while (given := testbed.sent_bytes(RELAY)) < GIVEN:  # each look runs a command
            assert time.monotonic() < went_s + HANGS_S, f"the relay passed on {given} bytes only"
        testbed.cut(RELAY)
        cut_s = time.monotonic()
        crew.replies([0], CastFinished, HANGS_S)
        done = crew.replies(others, CastFinished, HANGS_S)
        ended_s = max(one.ended_s for one in done) - cut_s
        alive = [0, *others]  # the relay gives up by itself, and is gone then
        crew.send(ReportDigest(), alive)
        reported = crew.replies(alive, DigestReport, HANGS_S)
    assert [one.digest for one in reported] == [image.digest] * (NODES - 1)
    assert sum(one.faults["replanned"] for one in done) > 0  # blocks that the relay was to give
    # Whoever is silent is found dead by then, and one more that is dialled once; then the rest is cast.
    settings = LinkSettings()
    found_s = settings.ping_interval_s + settings.ping_timeout_s + settings.handshake_timeout_s
    assert ended_s < 2 * found_s + 10 * image.nbytes / RATE, f"{ended_s:.1f} s from the cut to the end"
