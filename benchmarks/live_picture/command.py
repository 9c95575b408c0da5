"""One load that is served meanwhile, as a picture drawn from what the platform itself tells of it.

Starts a platform (one gateway, `--sources` nodes that hold a random fp32 model in their hosts' memory, and
`--loading` others; links so slow that the load takes seconds), scales the function to the others, and keeps
`--requests` requests under way. Recorded are: the layers that each node says it can run (by the call with
which a controller hears of them), instances and pipelines from the change feed, and each token's time at the
client. Times are seconds since the scaling was asked for.

  python -m benchmarks.live_picture --json FILE --plot FILE.png
  python -m benchmarks.live_picture --from FILE --plot FILE.png      draws what was recorded
"""

import asyncio
import json
import random
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import SubprocessError
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import uvloop

from benchmarks.arguments import at_least, parser_of, say
from benchmarks.chaos_cluster import Cluster
from benchmarks.endings import end_politely
from benchmarks.live_picture_draw import draw
from benchmarks.live_serving_arguments import add_load, add_platform
from benchmarks.live_serving_client import Answer, Caller, crowd, draw_works
from benchmarks.live_serving_cluster import NotThere, Stage, platform, until
from benchmarks.live_serving_models import FAMILIES, write_model
from benchmarks.machine import describe_machine, write_records
from registry.change import Change, InstanceChanged, LiveChanged
from registry.channel import Channel
from registry.errors import RegistryError
from registry.instance import InstanceRecord, InstanceState
from registry.live import LiveRecord
from registry.live_messages import held_of_bytes
from registry.messages import InstanceProgress, StartInstance
from registry.secrets import load_or_create_secret

_FUNCTION = "picture"
_LONGEST_S = 300.0
_ALLOWED = 0.15  # of a load, besides the part that it takes the sources to give the whole model once


class Recorder:
    """Follows the change feed, and each start of the function at its node."""

    def __init__(self, cluster: Cluster, group: asyncio.TaskGroup) -> None:
        self.events: list[dict[str, Any]] = []
        self.ready: set[str] = set()
        self._cluster = cluster
        self._group = group
        self._secret = load_or_create_secret(cluster.data / "cluster.secret")
        self._channels: dict[str, str] = {}
        self._followed: set[str] = set()
        self._states: dict[str, str] = {}
        self._began_s = time.monotonic()

    def begin(self) -> None:
        """Times count from now on."""
        self._began_s = time.monotonic()
        self.events.clear()

    def since(self, at_s: float) -> float:
        return round(at_s - self._began_s, 4)

    async def run(self) -> None:
        """Record until cancelled."""
        async with self._cluster.state() as state:
            snapshot = await state.snapshot()
            self._channels = {change.record.id: change.record.channel for change in snapshot.nodes}
            async for _, change in state.watch(snapshot.cursor):
                self._hear(change)

    def _hear(self, change: Change) -> None:
        if isinstance(change, InstanceChanged) and change.record.function == _FUNCTION:
            self._instance(change.record)
        elif isinstance(change, LiveChanged) and change.record.function == _FUNCTION:
            self._pipelines(change.record)

    def _instance(self, record: InstanceRecord) -> None:
        if self._states.get(record.instance_id) != record.state:
            self._states[record.instance_id] = record.state
            self._note("instance", node=record.node, state=record.state.value)
        if record.state is InstanceState.READY:
            self.ready.add(record.node)
        elif record.state is InstanceState.LOADING and record.instance_id not in self._followed:
            self._followed.add(record.instance_id)
            self._group.create_task(self._follow(record))

    def _pipelines(self, record: LiveRecord) -> None:
        told = {"way": record.way.value, "reason": record.reason}
        self._note("live", **told, pipelines=[asdict(pipeline) for pipeline in record.pipelines])

    async def _follow(self, record: InstanceRecord) -> None:
        """Join the start, as a controller does that takes over."""
        request = StartInstance(
            instance_id=record.instance_id,
            function=record.function,
            version=record.version,
            task="generate",
            architecture="",
            dtype="float32",
            context_length=1,
            max_concurrency=record.max_concurrency,
            assets={},
            image=None,
            controller_epoch=0,
            live=True,
        )
        told = None
        with suppress(RegistryError):  # it has ended
            channel = await Channel.connect(self._channels[record.node], self._secret)
            try:
                async with channel.call(request) as replies:
                    async for reply in replies:
                        if isinstance(reply, InstanceProgress) and reply.held != told:
                            told = reply.held
                            self._note("held", node=record.node, layers=held_of_bytes(reply.held))
            finally:
                await channel.aclose()

    def _note(self, kind: str, **what: Any) -> None:
        self.events.append({"at_s": self.since(time.monotonic()), "kind": kind, **what})


async def record(cluster: Cluster, args: Namespace, model: Path) -> dict[str, Any]:
    """The load, and what was told of it. Raises NotThere."""
    headers = {"authorization": f"Bearer {cluster.admin_key}"}
    async with httpx2.AsyncClient(
        base_url=cluster.urls[0], headers=headers, timeout=120.0, trust_env=False
    ) as http:
        stage, caller = Stage(http), Caller(http)
        names = [part.name for part in cluster.nodes]
        sources, cold = names[: args.sources], names[args.sources :]
        await deploy(cluster, stage, model, args)
        await stage.held_by(_FUNCTION, sources)
        works = draw_works(random.Random(args.seed), 64, (args.tokens // 6, args.tokens))
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            recorder = Recorder(cluster, group)
            recording = group.create_task(recorder.run())
            recorder.begin()
            await stage.scale(_FUNCTION, args.loading, cold, wait=False)
            asking = group.create_task(crowd(caller, _FUNCTION, works, args.requests, over))

            async def all_ready() -> bool:
                return recorder.ready >= set(cold)

            try:
                await until("all are ready", all_ready, _LONGEST_S)
                await asyncio.sleep(args.after)  # how it goes on is to be seen, too
            finally:
                over.set()
            await asking
            recording.cancel()
        failed = [answer.failure for answer in caller.answers if answer.failure]
        if failed:
            raise NotThere(f"{len(failed)} requests failed, such as by: {failed[0]}")
        answers = [told_of(answer, recorder) for answer in caller.answers]
        found = {"events": recorder.events, "answers": answers}
        return {"first_token": first_token(found, args.sources), **found}


def first_token(found: Mapping[str, Any], sources: int) -> dict[str, Any]:
    """When the first token of nodes that still load came, as a share of what a whole load took the first of
    them; with k sources the model can be whole among them after one k-th."""
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


async def deploy(cluster: Cluster, stage: Stage, model: Path, args: Namespace) -> None:
    limits = ("--max-instances", str(args.loading), "--target-concurrency", "16", "--keep-alive", "10m")
    live = ("--live", "auto", "--ttft-target", "1s", "--dtype", "float32")
    await asyncio.to_thread(cluster.command, "deploy", str(model), "--name", _FUNCTION, *live, *limits)
    await stage.asleep(_FUNCTION)


def told_of(answer: Answer, recorder: Recorder) -> dict[str, Any]:
    return {
        "sent_s": recorder.since(answer.sent_s),
        "start_kind": answer.start_kind,
        "arrived_s": [recorder.since(at_s) for at_s in answer.arrived_s],
    }


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    parser = parser_of("benchmarks.live_picture", __doc__)
    add = parser.add_argument
    add("--json", type=Path, help="write what was recorded to this file")
    add("--plot", type=Path, help="write a PNG to this file (needs matplotlib)")
    add("--from", dest="recorded", type=Path, help="draw this file instead of running anything")
    add("--family", choices=tuple(FAMILIES), default="llama")
    add("--sources", type=at_least(1), default=2, help="nodes that hold the model (default 2)")
    add_load(parser, requests=12, tokens=72)
    add("--after", type=float, default=3.0, help="seconds after the last node is ready (default 3)")
    add_platform(parser, width=256, link_rate="12mbit")
    return parser.parse_args(arguments)


def main() -> None:
    end_politely()
    args = parse()
    if args.recorded is not None:
        found = json.loads(args.recorded.read_text())[0]
    else:
        skipped = ("json", "plot", "recorded", "data_dir")
        given = {name: value for name, value in vars(args).items() if name not in skipped}
        params = {**given, **describe_machine("benchmarks.live_picture")}
        try:
            with (
                TemporaryDirectory(prefix="hypercast-live-model-") as folder,
                platform(args, args.sources + args.loading) as cluster,
            ):
                params["image_bytes"] = write_model(args.family, args.width, Path(folder))
                say(f"{params['image_bytes'] / 1e6:.1f} MB to {args.loading} nodes")
                found = uvloop.run(record(cluster, args, Path(folder)))
        except (NotThere, RuntimeError, OSError, SubprocessError, httpx2.HTTPError, ExceptionGroup) as error:
            sys.exit(f"live_picture: {error!r}")
        found = {"name": "live-picture", "params": params, **found}
        say(f"first token of nodes that load: {found['first_token']}")
        if args.json:
            write_records(args.json, [found])
    if args.plot:
        draw(found, args.plot)


if __name__ == "__main__":
    main()
