"""One scenario: its streams all the time, and beside them one condition after the other."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from benchmarks.harness.arguments import say
from benchmarks.harness.http_exchange import HttpEndpoint
from benchmarks.harness.processor import read_times
from benchmarks.harness.stream_client import StreamResult
from benchmarks.interference.cluster import (
    CastSeen,
    ServingNodes,
    cast,
    hold,
    serve_alone,
    serve_disaggregated,
)
from benchmarks.interference.conditions import Condition, ServingScenario
from benchmarks.interference.figures import Window
from benchmarks.interference.streams import StreamOrder, Streams
from benchmarks.testbed.hosted_platform import TestbedPlatform
from benchmarks.testbed.network import Testbed
from cli.client import Client

_LEAD_S = 2.0  # of streams before the first condition
_SETTLE_S = 0.5  # after a change of queues, which loses packets

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioRun:
    """The streams of a scenario, its windows, and the seconds of casts without streams beside them."""

    streams: Sequence[StreamResult]
    windows: Sequence[Window]
    idle_casts_s: Sequence[float]
    processor_share: float


class ScenarioCluster:
    """A platform on a testbed whose links change; the first `serving` nodes serve, `targets` take casts."""

    def __init__(
        self, testbed: Testbed, platform: TestbedPlatform, serving: Sequence[str], targets: Sequence[str]
    ) -> None:
        self._testbed = testbed
        self._platform = platform
        self._serving = serving
        self._targets = targets

    def run(self, scenario: ServingScenario, order: StreamOrder, casts: int) -> ScenarioRun:
        """Run each condition `casts` times. Raises CliError, PlatformError, TestbedError, OSError."""
        nodes = self._serve(scenario)
        before, windows = read_times(), list[Window]()
        with self._streams(order) as streams:
            time.sleep(_LEAD_S)
            for turn in range(casts):
                for condition in scenario.conditions:
                    windows.append(self._window(condition, nodes, windows))
                say(f"{scenario.name}: turn {turn + 1} of {casts}: {_shown(windows, scenario.conditions)}")
        share = read_times().since(before).share
        idle_s = [self._cast([nodes.sender], bands=True).seconds for _ in range(casts)]
        say(f"{scenario.name}: casts without streams: {', '.join(f'{one:.2f} s' for one in idle_s)}")
        return ScenarioRun(
            streams=streams.finished, windows=windows, idle_casts_s=idle_s, processor_share=share
        )

    def _serve(self, scenario: ServingScenario) -> ServingNodes:
        serve = serve_disaggregated if scenario.is_disaggregated else serve_alone
        return self._control(partial(serve, nodes=self._serving))

    def _streams(self, order: StreamOrder) -> Streams:
        netns = self._testbed.plan.namespace(0)
        return Streams(netns, HttpEndpoint.of(self._platform.url, self._platform.key), order)

    def _window(self, condition: Condition, nodes: ServingNodes, earlier: Sequence[Window]) -> Window:
        """Let the condition hold for a cast; without one for as long as the last one took."""
        if not condition.casts:
            started_s = time.perf_counter()
            time.sleep(earlier[-1].ended_s - earlier[-1].started_s)
            return Window(condition=condition.name, started_s=started_s, ended_s=time.perf_counter())
        holders = [nodes.named(role) for role in condition.holders]
        self._prepare(holders, bands=condition.bands)
        started_s = time.perf_counter()
        seen = self._control(partial(cast, targets=self._targets))
        ended_s = time.perf_counter()
        self._control(partial(hold, nodes=holders))
        return Window(
            condition=condition.name,
            started_s=started_s,
            ended_s=ended_s,
            cast_s=seen.seconds,
            sources=tuple(nodes.role_of(source) for source in seen.sources),
        )

    def _cast(self, holders: Sequence[str], *, bands: bool) -> CastSeen:
        self._prepare(holders, bands=bands)
        return self._control(partial(cast, targets=self._targets))

    def _prepare(self, holders: Sequence[str], *, bands: bool) -> None:
        """Have these nodes alone hold the image, and the links their queues."""
        self._control(partial(hold, nodes=holders))
        self._testbed.set_bands(bands)
        time.sleep(_SETTLE_S)

    def _control(self, work: Callable[[Client], T]) -> T:
        return self._platform.in_testbed(work)


def _shown(windows: Sequence[Window], conditions: Sequence[Condition]) -> str:
    last = windows[-len(conditions) :]
    return ", ".join(f"{one.condition} {one.cast_s:.2f} s" for one in last if one.cast_s)
