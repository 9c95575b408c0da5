"""One run of one mode: a new platform in the testbed, the model placed, the trace sent."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.testbed.hosted_platform import PlatformError, TestbedPlatform, warm_nodes
from benchmarks.testbed.link_meter import LinkBytes
from benchmarks.trace.client import PROTOCOL, SendTrace, TraceSent
from benchmarks.trace.decisions import DecisionMonitor, SeenDecision
from benchmarks.trace.modes import TraceMode
from benchmarks.trace.scenario import TraceScenario
from benchmarks.trace.watch import SeenPlans, UsageMonitor, UsageSample
from cli.client import Client
from cli.commands.deploy import registration, send
from registry.config.emulation import EmulatedDevice

_PATIENCE_S = 120.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """What the client and the monitors saw of one run, in time of the machine.

    With `own_disk` what nodes read from the store's folder took as long as from a disk.
    """

    sent: TraceSent
    samples: Sequence[UsageSample]
    plans: SeenPlans
    links: Sequence[LinkBytes] = ()
    decisions: Sequence[SeenDecision] = ()
    own_disk: bool = False


def run_trace(platform: TestbedPlatform, mode: TraceMode, scenario: TraceScenario) -> TraceResult:
    """Place the model on a new platform as the mode requires, and send the trace.

    Raises PlatformError, CrewError, CliError.
    """
    device = str(EmulatedDevice(**{**asdict(scenario.device), "name": mode.device}))
    how: dict[str, Any] = {
        "group_s": mode.setup_s * scenario.slower,
        "late_s": scenario.lateness.step_s,
        "hop_late_s": scenario.lateness.hop_s,
    }
    if mode.own_disk:
        disk = {"store": str(platform.store), "disk_bytes_s": scenario.disk_bytes_s}
        how |= {**disk, "takes_casts": bool(mode.planner)}
    options = ["--device", device, "--gpu-memory", f"{scenario.arena_bytes}B"]
    if mode.frees_images:
        options += ["--keep-hot", "0s"]
    platform.start_nodes(range(scenario.nodes), scenario.host_bytes(mode), *options, **how)
    platform.in_testbed(lambda client: _place(client, mode, scenario))
    order = SendTrace(
        functions=list(scenario.functions),
        arrivals=[
            (one.offset_s * scenario.slower, one.prompt_tokens, one.output_tokens, one.function)
            for one in scenario.arrivals
        ],
        vocabulary=scenario.profile.model.vocabulary,
        window_s=scenario.window_s * scenario.slower,
    )
    redis = platform.cluster.redis.url
    with (
        UsageMonitor(redis) as monitor,
        DecisionMonitor(redis, scenario.functions) as deciding,
        platform.link_meter() as meter,
    ):
        patience_s = 4 * order.window_s + _PATIENCE_S
        sent = platform.ask_client("benchmarks.trace.client", PROTOCOL, order, TraceSent, patience_s)
    return TraceResult(
        sent=sent,
        samples=monitor.samples,
        plans=monitor.plans,
        links=meter.samples,
        decisions=deciding.seen,
        own_disk=mode.own_disk,
    )


def _place(client: Client, mode: TraceMode, scenario: TraceScenario) -> None:
    """Deploy the functions, and wait for the copies and ready instances that a run begins with."""
    for place, (name, bundle) in enumerate(zip(scenario.functions, scenario.bundles, strict=True)):
        send(client, bundle)
        body = registration(name, bundle, scenario.scaling(mode, place))
        client.json("POST", "/admin/functions", json=body)
        copies = scenario.copies(mode, place)
        if copies:
            warm_nodes(client, name, min(copies, scenario.nodes))
    deadline_s = time.monotonic() + _PATIENCE_S
    for place, name in enumerate(scenario.functions):
        wanted = scenario.at_first(mode, place)
        while _ready(client, name) < wanted:
            if time.monotonic() > deadline_s:
                raise PlatformError(f"{name} has {_ready(client, name)} instances, not {wanted}")
            time.sleep(_PAUSE_S)


def _ready(client: Client, name: str) -> int:
    instances = client.json("GET", f"/admin/functions/{name}")["instances"]
    return sum(one["state"] == "ready" for one in instances)
