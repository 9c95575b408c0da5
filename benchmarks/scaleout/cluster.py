"""One burst of requests at a platform in a testbed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from benchmarks.scaleout.client import PROTOCOL, Burst, BurstAnswer, BurstSent
from benchmarks.scaleout.modes import Mode
from benchmarks.scaleout.watch import ServingMonitor, ServingSet
from benchmarks.testbed.hosted_platform import TestbedPlatform, warm_nodes
from cli.client import Client
from cli.commands.deploy import registration, send
from cli.upload.bundle import Bundle
from invoker.emulated.profiles import find_device
from registry.config.emulation import EmulatedDevice

FUNCTION = "emulated"
_FAST = "h800"


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstScenario:
    """What is equal for all modes.

    `sources`, the first nodes, hold the model in `holders` memory when the burst arrives: "host", "gpu"
    where they serve it, or "mixed", half and half. Without an emulated `device` the nodes compute on the
    processor.
    """

    device: EmulatedDevice | None
    bundle: Bundle
    nodes: int
    sources: int
    holders: str
    burst: Burst

    @property
    def slower(self) -> int:
        """The factor by which devices and links are slowed down."""
        return 1 if self.device is None else self.device.slower

    @property
    def own_copy_s(self) -> float:
        """Seconds from a node's own host memory to its accelerator; 0 on a processor."""
        return 0.0 if self.device is None else self.slower * self.bundle.image_bytes / self.host_bytes_s

    @property
    def host_bytes_s(self) -> float:
        assert self.device is not None
        _, links = find_device(self.device)
        return links.host / self.device.scale

    @property
    def serving(self) -> int:
        """How many of the sources, the first ones, serve when the burst arrives."""
        return {"host": 0, "gpu": self.sources, "mixed": self.sources // 2}[self.holders]

    def source_device(self, mode: Mode) -> str:
        """Return the device of holders; with the model on the accelerator it was loaded before."""
        return self._device(_FAST if self.holders == "gpu" else mode.source_device)

    def target_device(self, mode: Mode) -> str:
        return self._device(mode.target_device)

    def _device(self, name: str) -> str:
        if self.device is None:
            return "cpu"
        return str(EmulatedDevice(**{**asdict(self.device), "name": name}))


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstResult:
    """The answers to a burst, and what served meanwhile, in model time."""

    answers: list[BurstAnswer]
    seen: list[ServingSet]


def send_burst(platform: TestbedPlatform, mode: Mode, scenario: BurstScenario, wait_s: float) -> BurstResult:
    """Place the model on a new platform as the mode requires, and send the burst. Raises CrewError.

    Nodes without the model wait `wait_s` before its first byte.
    """
    start_nodes = partial(_start_nodes, platform, scenario)
    start_nodes(range(scenario.sources), scenario.source_device(mode), 0.0)
    platform.in_testbed(partial(_deploy, scenario, mode))
    if scenario.sources > 1 or scenario.serving:
        platform.in_testbed(partial(_place_image, scenario))
    start_nodes(range(scenario.sources, scenario.nodes), scenario.target_device(mode), wait_s)
    if mode.own_copies and scenario.sources < scenario.nodes:
        platform.in_testbed(lambda client: warm_nodes(client, FUNCTION, scenario.nodes))
    with ServingMonitor(platform.cluster.redis.url) as watch:
        patience_s = 2 * scenario.burst.timeout_s
        sent = platform.ask_client(
            "benchmarks.scaleout.client", PROTOCOL, scenario.burst, BurstSent, patience_s
        )
    seen = [one.since(sent.started_s, scenario.slower) for one in watch.seen]
    return BurstResult(answers=sent.answers, seen=seen)


def _start_nodes(
    platform: TestbedPlatform, scenario: BurstScenario, numbers: Sequence[int], device: str, wait_s: float
) -> None:
    image_bytes = scenario.bundle.image_bytes
    options: tuple[object, ...] = ("--device", device)
    if scenario.device is None:
        options += ("--gpu-memory", f"{3 * image_bytes + (1 << 30)}B", "--threads", "1")
    platform.start_nodes(numbers, 3 * image_bytes + (64 << 20), *options, wait_s=wait_s)


def _deploy(scenario: BurstScenario, mode: Mode, client: Client) -> None:
    send(client, scenario.bundle)
    scaling = {
        "target_concurrency": -(-scenario.burst.requests // scenario.nodes),
        "keep_alive_s": 3600.0,
        "live": mode.live,
    }
    client.json("POST", "/admin/functions", json=registration(FUNCTION, scenario.bundle, scaling))


def _place_image(scenario: BurstScenario, client: Client) -> None:
    if scenario.serving:
        body = {"instances": scenario.serving, "on": [], "wait": True}
        client.request("POST", f"/admin/functions/{FUNCTION}/scale", json=body)
    if scenario.serving < scenario.sources:
        warm_nodes(client, FUNCTION, scenario.sources)
