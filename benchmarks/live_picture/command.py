"""Record one load that serves requests meanwhile, from the platform's own reports, and draw it.

Starts a platform (one gateway, --sources nodes that hold a random fp32 model in host memory, and --loading
others; links so slow that the load takes seconds), scales the function to the others, and keeps --requests
requests in flight. Recorded are the parts of the image that arrive and the layers that each node can run (by
the calls from which gateways and a controller receive them), instances and pipelines from the change feed,
and each token's arrival at the client. Times are seconds since the scale request.

examples:
  python -m benchmarks.live_picture --json picture.json --plot picture.png
  python -m benchmarks.live_picture --from picture.json --plot picture.png     only draws a recorded file
"""

import asyncio
import json
import random
import time
from argparse import Namespace
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.harness.admin_client import AdminClient, http_client, until
from benchmarks.harness.arguments import at_least, benchmark_parser, say
from benchmarks.harness.local_platform import PLATFORM_FAILURES, LocalPlatform, PlatformStateError
from benchmarks.harness.records import Recording, all_but, describe_run, recording
from benchmarks.live_picture.draw import draw
from benchmarks.live_serving.arguments import add_load, add_platform
from benchmarks.live_serving.client import LiveAnswer, LiveClient, draw_requests, run_clients
from benchmarks.live_serving.models import FAMILIES, write_model
from benchmarks.live_serving.platform import slow_link_platform
from rdmacast.aio.groups import cancel_and_discard
from registry.channel.client import Channel
from registry.config.secrets import load_or_create_secret
from registry.errors import RegistryError
from registry.messages.arrivals import Arrivals, FollowArrivals
from registry.messages.live import decode_layer_set
from registry.messages.node import InstanceProgress, StartInstance
from registry.records.change import Change, InstanceChanged, LiveChanged
from registry.records.instance import InstanceRecord, InstanceState
from registry.records.live import LiveRecord

_FUNCTION = "picture"
_MAX_LOAD_S = 300.0
_ALLOWED = 0.15  # fraction of a load beyond the sources' time to send the model once


class Recorder:
    """Follows the change feed, and each start of the function at its node."""

    def __init__(self, platform: LocalPlatform, group: asyncio.TaskGroup) -> None:
        self.events: list[dict[str, Any]] = []
        self.ready: set[str] = set()
        self._platform = platform
        self._group = group
        self._secret = load_or_create_secret(platform.data / "cluster.secret")
        self._channels: dict[str, str] = {}
        self._followed: set[str] = set()
        self._states: dict[str, str] = {}
        self._started_s = time.monotonic()

    def begin(self) -> None:
        """Restart the clock, and drop earlier events."""
        self._started_s = time.monotonic()
        self.events.clear()

    def since(self, at_s: float) -> float:
        return round(at_s - self._started_s, 4)

    async def run(self) -> None:
        """Record until cancelled."""
        async with self._platform.state() as state:
            snapshot = await state.snapshot()
            self._channels = {change.record.id: change.record.channel for change in snapshot.nodes}
            async for _, change in state.watch(snapshot.cursor):
                self._on_change(change)

    def _on_change(self, change: Change) -> None:
        if isinstance(change, InstanceChanged) and change.record.function == _FUNCTION:
            self._instance(change.record)
        elif isinstance(change, LiveChanged) and change.record.function == _FUNCTION:
            self._pipelines(change.record)

    def _instance(self, record: InstanceRecord) -> None:
        if self._states.get(record.instance_id) != record.state:
            self._states[record.instance_id] = record.state
            self._add_event("instance", node=record.node, state=record.state.value)
        if record.state is InstanceState.READY:
            self.ready.add(record.node)
        elif record.state is InstanceState.LOADING and record.instance_id not in self._followed:
            self._followed.add(record.instance_id)
            self._group.create_task(self._follow(record))

    def _pipelines(self, record: LiveRecord) -> None:
        fields = {"way": record.way.value, "reason": record.reason}
        self._add_event("live", **fields, pipelines=[asdict(pipeline) for pipeline in record.pipelines])

    async def _follow(self, record: InstanceRecord) -> None:
        """Join the start, like a controller that takes over."""
        request = StartInstance(
            instance_id=record.instance_id,
            function=record.function,
            version=record.version,
            task="generate",
            dtype="float32",
            context_length=1,
            max_concurrency=record.max_concurrency,
            assets={},
            image=None,
            controller_epoch=0,
            live=True,
        )
        last = None
        with suppress(RegistryError):  # the start has ended
            channel = await Channel.connect(self._channels[record.node], self._secret)
            blocks = asyncio.create_task(self._follow_blocks(channel, record.node))
            try:
                async with channel.call(request) as replies:
                    async for reply in replies:
                        if isinstance(reply, InstanceProgress) and reply.held != last:
                            last = reply.held
                            self._add_event("held", node=record.node, layers=decode_layer_set(reply.held))
            finally:
                await cancel_and_discard(blocks)
                await channel.aclose()

    async def _follow_blocks(self, channel: Channel, node: str) -> None:
        """Record which parts of the image have arrived, until cancelled."""
        with suppress(RegistryError):
            async with channel.call(FollowArrivals()) as replies:
                async for reply in replies:
                    for image in reply.images if isinstance(reply, Arrivals) else ():
                        held = b64encode(image.held).decode()
                        self._add_event("blocks", node=node, cells=image.cells, held=held)

    def _add_event(self, kind: str, **what: Any) -> None:
        self.events.append({"at_s": self.since(time.monotonic()), "kind": kind, **what})


async def record(platform: LocalPlatform, args: Namespace, model: Path) -> dict[str, Any]:
    """Run the load and return its record. Raises PlatformStateError."""
    async with http_client(platform.url, platform.admin_key) as http:
        admin, client = AdminClient(http), LiveClient(http)
        names = [node_component.name for node_component in platform.nodes]
        sources, cold = names[: args.sources], names[args.sources :]
        await deploy(platform, admin, model, args)
        await admin.place_image(_FUNCTION, sources)
        works = draw_requests(random.Random(args.seed), 64, (args.tokens // 6, args.tokens))
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            recorder = Recorder(platform, group)
            recording = group.create_task(recorder.run())
            recorder.begin()
            await admin.scale(_FUNCTION, args.loading, cold, wait=False)
            asking = group.create_task(run_clients(client, _FUNCTION, works, args.requests, over))

            async def all_ready() -> bool:
                return recorder.ready >= set(cold)

            try:
                await until(f"{', '.join(cold)} are ready", all_ready, _MAX_LOAD_S)
                await asyncio.sleep(args.after)  # record what follows
            finally:
                over.set()
            await asking
            recording.cancel()
        failed = [answer.failure for answer in client.answers if answer.failure]
        if failed:
            raise PlatformStateError(f"{len(failed)} requests failed, the first: {failed[0]}")
        answers = [answer_record(answer, recorder) for answer in client.answers]
        found = {"events": recorder.events, "answers": answers}
        return {"first_token": first_token(found, args.sources), **found}


def first_token(found: Mapping[str, Any], sources: int) -> dict[str, Any]:
    """Return when the first token of loading nodes arrived, as a fraction of the first complete load.

    With k sources the model can be complete among the nodes after one k-th.
    """
    live = [one["arrived_s"][0] for one in found["answers"] if one["start_kind"] == "live"]
    whole = [one["at_s"] for one in found["events"] if one["kind"] == "instance" and one["state"] == "ready"]
    first_s = min(live, default=None)
    return {
        "live": len(live),
        "first_live_s": first_s,
        "whole_s": sorted(whole),
        "share": None if first_s is None else round(first_s / min(whole), 4),
        "limit": round(1 / sources + _ALLOWED, 4),
    }


async def deploy(platform: LocalPlatform, admin: AdminClient, model: Path, args: Namespace) -> None:
    limits = ("--max-instances", str(args.loading), "--target-concurrency", "16", "--keep-alive", "10m")
    live = ("--live", "auto", "--ttft-target", "1s", "--dtype", "float32")
    await asyncio.to_thread(platform.command, "deploy", str(model), "--name", _FUNCTION, *live, *limits)
    await admin.scale_to_zero(_FUNCTION)


def answer_record(answer: LiveAnswer, recorder: Recorder) -> dict[str, Any]:
    return {
        "sent_s": recorder.since(answer.sent_s),
        "start_kind": answer.start_kind,
        "arrived_s": [recorder.since(at_s) for at_s in answer.arrived_s],
    }


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    parser = benchmark_parser("benchmarks.live_picture", __doc__, plot=True)
    add = parser.add_argument
    add("--from", dest="recorded", type=Path, help="draw this file instead of running a load")
    add("--family", choices=tuple(FAMILIES), default="llama", help="model family")
    add("--sources", type=at_least(1), default=2, help="nodes that hold the model")
    add_load(parser, requests=12, tokens=72)
    add("--after", type=float, default=3.0, help="seconds to record after the last node is ready")
    add_platform(parser, width=256, link_rate="12mbit")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    if args.recorded is not None:
        if args.plot:
            draw(json.loads(args.recorded.read_text())[0], args.plot)
        return
    with recording(
        "live_picture",
        json=args.json,
        show=show,
        plot=args.plot,
        draw=lambda records, path: draw(records[0], path),
        failures=PLATFORM_FAILURES,
    ) as out:
        run(args, out)


def run(args: Namespace, out: Recording) -> None:
    """Record one load on a platform of its own."""
    params = {**all_but(args, "recorded"), **describe_run("benchmarks.live_picture")}
    with (
        TemporaryDirectory(prefix="hypercast-live-model-") as folder,
        slow_link_platform(args, args.sources + args.loading) as platform,
    ):
        params["image_bytes"] = write_model(args.family, args.width, Path(folder))
        say(f"{params['image_bytes'] / 1e6:.1f} MB to {args.loading} nodes")
        found = uvloop.run(record(platform, args, Path(folder)))
    out.add({"name": "live-picture", "params": params, **found})


def show(record: dict[str, Any]) -> str:
    """Format the time of the first token."""
    return f"first token of loading nodes: {record['first_token']}"


if __name__ == "__main__":
    main()
