"""One run of one mode: a new platform in the testbed, the model placed, the trace sent."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.traces import TraceRequest
from benchmarks.testbed.hosted_platform import PlatformError, TestbedPlatform, warm_nodes
from benchmarks.trace.client import PROTOCOL, SendTrace, TraceSent
from benchmarks.trace.measures import Slo
from benchmarks.trace.modes import TraceMode
from benchmarks.trace.watch import SeenPlans, UsageMonitor, UsageSample
from cli.client import Client
from cli.commands.deploy import registration, send
from cli.upload.bundle import Bundle
from invoker.emulated.device_clock import Lateness
from invoker.emulated.profiles import Profile
from registry.config.emulation import EmulatedDevice

_FOREVER_S = 86_400.0
_PATIENCE_S = 120.0
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceScenario:
    """What is equal for all modes; all times are model time.

    `policy` is the scaling policy with its settings, `scale_down_s` how long a surplus of instances lasts,
    `host_ttl_s` how long an idle copy stays in host memory. Runs begin with one instance, and their windows
    end `tail_s` after the last arrival: requests that are not answered by then are, but the GPU time that
    they take later does not count.
    """

    device: EmulatedDevice
    profile: Profile
    lateness: Lateness
    bundle: Bundle
    nodes: int
    arrivals: Sequence[TraceRequest]
    functions: Sequence[str]
    policy: str
    target_concurrency: int
    slo: Slo
    scale_down_s: float
    host_ttl_s: float
    tail_s: float

    @property
    def slower(self) -> int:
        return self.device.slower

    @property
    def window_s(self) -> float:
        return self.arrivals[-1].offset_s + self.tail_s

    @property
    def disk_bytes_s(self) -> float:
        """A disk's rate, so that a start from it takes as long as from one that is read in many small pieces.

        The images are so small that the copy of the last piece to the accelerator would be added.
        """
        links = self.profile.links
        return 1 / (1 / links.disk - 1 / links.host) / self.device.scale / self.slower

    @property
    def arena_bytes(self) -> int:
        """An accelerator's memory, so that an instance has the KV cache of one which it has for itself.

        An instance takes half of the free memory, and leaves the rest to other functions.
        """
        usable = 0.9 * self.profile.gpus * self.profile.gpu.memory_bytes / self.device.scale
        return int(self.bundle.image_bytes + 2 * (usable - self.bundle.image_bytes))

    def scaling(self, mode: TraceMode) -> dict[str, Any]:
        """Return the function's scaling settings, in time of the machine."""
        fixed, slower = mode.instances(self.nodes), self.slower
        settings: dict[str, Any] = {
            "min_instances": fixed or 1,
            "max_instances": fixed or self.nodes,
            "keep_alive_s": self.scale_down_s * slower,
            "host_keep_alive_s": _FOREVER_S if mode.cached else self.host_ttl_s * slower,
            "live": mode.live,
            "ttft_target_s": self.slo.ttft_s * slower,
        }
        if self.policy == "concurrency":
            return {**settings, "target_concurrency": self.target_concurrency}
        delay_s = self.scale_down_s * slower
        return {
            **settings,
            "policy": self.policy,
            "tbt_target_s": self.slo.tbt_s * slower,
            "scale_down_delay_s": delay_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """What the client and the monitor saw of one run, in time of the machine."""

    sent: TraceSent
    samples: Sequence[UsageSample]
    plans: SeenPlans


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
        how |= {"store": str(platform.store), "disk_bytes_s": scenario.disk_bytes_s}
    options = ("--device", device, "--gpu-memory", f"{scenario.arena_bytes}B")
    platform.start_nodes(range(scenario.nodes), scenario.bundle.image_bytes, *options, **how)
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
    with UsageMonitor(platform.cluster.redis.url) as monitor:
        patience_s = 4 * order.window_s + _PATIENCE_S
        sent = platform.ask_client("benchmarks.trace.client", PROTOCOL, order, TraceSent, patience_s)
    return TraceResult(sent=sent, samples=monitor.samples, plans=monitor.plans)


def _place(client: Client, mode: TraceMode, scenario: TraceScenario) -> None:
    """Deploy the functions, and wait until the instances that a run begins with are ready."""
    send(client, scenario.bundle)
    for name in scenario.functions:
        body = registration(name, scenario.bundle, scenario.scaling(mode))
        client.json("POST", "/admin/functions", json=body)
        if mode.cached:
            warm_nodes(client, name, scenario.nodes)
    deadline_s = time.monotonic() + _PATIENCE_S
    wanted = mode.instances(scenario.nodes) or 1
    for name in scenario.functions:
        while _ready(client, name) < wanted:
            if time.monotonic() > deadline_s:
                raise PlatformError(f"{name} has {_ready(client, name)} instances, not {wanted}")
            time.sleep(_PAUSE_S)


def _ready(client: Client, name: str) -> int:
    instances = client.json("GET", f"/admin/functions/{name}")["instances"]
    return sum(one["state"] == "ready" for one in instances)
