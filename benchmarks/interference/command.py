r"""Measure what a cast costs the streams that its source serves, and what the streams cost the cast.

Nodes are on hosts of their own behind shaped links (`benchmarks.testbed`; needs root and iproute2). One node
serves streams, of which a fixed number is in flight all the time, and holds the image of another function,
which is cast from there to --targets nodes, again and again. Conditions take turns beside the same streams:

one-queue  links have one queue for all packets, as without any mechanism
limited    links have bands: tokens and hidden states first, then K and V, then weights
avoided    (hand-off) the node that only receives K and V holds the image too, and is the source
elsewhere  (streams) a node that serves nothing is the source: what one machine for all nodes costs
alone      no cast, for as long as the cast before took

scenarios:
  streams-13b     one instance of an emulated model
  handoff-13b     an emulated instance runs prompts and hands K and V to another one, which decodes
  streams-native  a small random model that the native engine computes on the processor

Records, one a scenario and condition, in model time (measured time divided by --slower):
tbt_p99_s       between two tokens of a stream, of which the second came during a cast; beside that without
                a cast: tbt_p99_ratio. In a hand-off the second token waits for K and V
ttft_p99_s      of streams that were due during a cast
cast_s          from the plan until the last target had the image, the median of `casts_s`; beside the
                median without any streams (`idle_cast_s`): cast_ratio
sources         of the casts: `sender` serves (hand-off: runs prompts), `receiver` decodes, `other` does not
                serve
meets           tbt_p99_ratio is at most 1.2, and cast_ratio at most 1.15

A run counts only if no stream failed (`counts`); if one did, the exit status is 1 after the records are
written.

examples:
  sudo python -m benchmarks.interference --json interference.json
  sudo python -m benchmarks.interference --scenarios handoff-13b --casts 10 --targets 5
"""

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.arguments import at_least, benchmark_parser, say, some_of
from benchmarks.harness.crew import CrewError
from benchmarks.harness.owner import scratch_folder
from benchmarks.harness.records import Record, Recording, chosen, describe_run, recording
from benchmarks.interference.cluster import SERVED, deploy
from benchmarks.interference.conditions import SCENARIOS, ServingScenario
from benchmarks.interference.records import records_of, show
from benchmarks.interference.run import ScenarioCluster
from benchmarks.interference.streams import StreamOrder
from benchmarks.live_serving.models import VOCABULARY, write_model
from benchmarks.scaleout.profiles import network_bytes_per_s
from benchmarks.scaleout.scenarios import add_emulated, emulated_device, emulated_model, parse_emulated
from benchmarks.testbed.hosted_platform import PlatformError, TestbedPlatform
from benchmarks.testbed.network import Testbed, TestbedError
from benchmarks.testbed.plan import LinkShape
from cli.errors import CliError
from cli.upload.bundle import Bundle, bundle_model
from registry.errors import RegistryError

_SERVING = 2  # nodes that may serve; the others take casts
_NATIVE_FAMILIES = ("llama", "qwen2")  # of the served image and of the one that is cast
_SPARE_BYTES = 64 << 20


class DoesNotCount(Exception):
    """The records are written, but what they say does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The nodes of a platform and their models: the emulated ones, or those on the processor."""

    served: Bundle
    weights: Bundle
    vocabulary: int
    slower: int
    options: Sequence[object]


def measure(args: argparse.Namespace, out: Recording) -> None:
    """Run the scenarios; `out` receives the records.

    Raises DoesNotCount after that, PlatformError, CrewError, CliError, TestbedError, OSError, ValueError.
    """
    rate = int(network_bytes_per_s(args.profile) / args.slower)
    scenarios = [SCENARIOS[name] for name in args.scenarios]
    own = _own_processor()
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(Path(tempfile.gettempdir())))
        shape = LinkShape(rate_bytes_s=rate, bands=True)
        testbed = stack.enter_context(Testbed(1 + _SERVING + args.targets, shape))
        common = {
            **chosen(args, "targets", "casts"),
            "link_bytes_s": rate,
            **describe_run("benchmarks.interference"),
        }
        for is_emulated in (True, False):
            some = [one for one in scenarios if one.emulated is is_emulated]
            if some:
                kind = _emulated(args) if is_emulated else _native(args, folder)
                _measure_on_one_platform(testbed, folder, some, kind, args, common, own, out)
    if uncounted := [row["name"] for row in out.records if not row["counts"]]:
        raise DoesNotCount(f"runs of {', '.join(uncounted)} do not count")


def _measure_on_one_platform(
    testbed: Testbed,
    folder: Path,
    scenarios: Sequence[ServingScenario],
    kind: _Kind,
    args: argparse.Namespace,
    common: Record,
    own: Sequence[int],
    out: Recording,
) -> None:
    with _cluster(testbed, folder, kind, args.targets, own) as cluster:
        for scenario in scenarios:
            say(f"{scenario.name}: {scenario.description}")
            order = StreamOrder(
                function=SERVED,
                vocabulary=kind.vocabulary,
                concurrent=scenario.concurrent,
                prompt_tokens=scenario.prompt_tokens,
                output_tokens=scenario.output_tokens,
            )
            run = cluster.run(scenario, order, args.casts)
            facts = {
                "model": kind.served.architecture,
                "image_bytes": kind.weights.image_bytes,
                "slower": kind.slower,
                **{
                    name: getattr(scenario, name) for name in ("concurrent", "prompt_tokens", "output_tokens")
                },
                "serving": scenario.serving.value,
            }
            out.add(*records_of(scenario, run, kind.slower, {**facts, **common}))


@contextmanager
def _cluster(
    testbed: Testbed, folder: Path, kind: _Kind, targets: int, own: Sequence[int]
) -> Iterator[ScenarioCluster]:
    """Run a platform; its first node holds both images, and serves, before the others start."""
    host_bytes = 3 * max(kind.served.image_bytes, kind.weights.image_bytes) + _SPARE_BYTES
    with (
        tempfile.TemporaryDirectory(dir=folder) as data,
        TestbedPlatform(testbed, Path(data) / "data") as platform,
    ):
        testbed.set_bands(True)
        platform.start_nodes([0], host_bytes, *kind.options, processors=own)
        platform.in_testbed(lambda client: deploy(client, kind.served, kind.weights))
        others = range(1, _SERVING + targets)
        platform.start_nodes(others, host_bytes, *kind.options)
        names = [f"n{number}" for number in range(_SERVING + targets)]
        yield ScenarioCluster(testbed, platform, names[:_SERVING], names[_SERVING:])


def _own_processor() -> tuple[int, ...]:
    """Move this process, and all that it will start, off one processor; return that one for the first node.

    Nodes on hosts of their own do not share one. Without a second processor none is set aside.
    """
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        return ()
    os.sched_setaffinity(0, others)
    return (first,)


def _emulated(args: argparse.Namespace) -> _Kind:
    served, weights = (bundle_model(emulated_model(args, variant), "auto", "", None) for variant in (0, 1))
    return _Kind(
        served=served,
        weights=weights,
        vocabulary=args.profile.model.vocabulary,
        slower=args.slower,
        options=("--device", emulated_device(args)),
    )


def _native(args: argparse.Namespace, folder: Path) -> _Kind:
    bundles = []
    for family in _NATIVE_FAMILIES:
        write_model(family, args.width, folder / family)
        bundles.append(bundle_model(str(folder / family), "auto", "float32", None))
    served, weights = bundles
    arena_bytes = 3 * served.image_bytes + (1 << 30)
    return _Kind(
        served=served,
        weights=weights,
        vocabulary=VOCABULARY,
        slower=1,
        options=("--device", "cpu", "--gpu-memory", f"{arena_bytes}B", "--threads", "1"),
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser("benchmarks.interference", __doc__)
    add = parser.add_argument
    add("--scenarios", type=some_of(SCENARIOS), default=",".join(SCENARIOS), help="of these")
    add("--targets", type=at_least(1), default=3, help="nodes that each cast brings the image to")
    add("--casts", type=at_least(1), default=6, help="casts under each condition")
    add("--width", type=at_least(64), default=256, help="width of the native model, a multiple of 64")
    add_emulated(parser, slower=4)
    args = parse_emulated(parser, arguments)
    if args.width % 64:
        parser.error("--width must be a multiple of 64")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    failures = (
        *(DoesNotCount, PlatformError, CrewError, CliError, TestbedError),
        *(RegistryError, OSError, ValueError),
    )
    with recording("interference", json=args.json, show=show, failures=failures) as out:
        measure(args, out)
