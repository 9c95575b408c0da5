"""Nodes as real processes for tests: a zygote that forks them, channels to them, a model they can start."""

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from registry.channel import Channel
from registry.images.pack import PackedFolder, pack_to_folder
from registry.images.store import LocalStore
from registry.messages import (
    Generate,
    GetStatus,
    Holder,
    ImageRef,
    Sampling,
    StartInstance,
)
from registry.node import NodeRecord
from registry.redis_state import RedisState
from registry.state import ClusterConfig
from tests.checkpoints import write_checkpoint
from tests.invoker_fixture import SECRET
from tests.patience import PATIENCE_S
from tests.redis_fixture import RedisServer, running_redis


class Zygote:
    """A zygote process and its events."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self._folder = folder
        self._redis_url = redis_url
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli.zygote", "invoker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "HYPERCAST_CLUSTER_SECRET": SECRET},
        )

    def send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def event(self) -> dict:
        """The next thing the zygote says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the zygote ended: {self.process.poll()}"
        return json.loads(line)

    def spawn(self, name: str, host: str, *flags: str) -> int:
        """Fork a node; returns its process id."""
        argv = ["--redis-url", self._redis_url, "--node-id", name, "--host-id", host, "--device", "cpu"]
        argv += ["--gpu-memory", "32MiB", "--host-memory", "64MiB", "--lease-s", "2", "--threads", "1"]
        order = {"id": name, "argv": [*argv, *flags], "log": str(self.log(name))}
        self.send(json.dumps({"spawn": order}).encode())
        event = self.event()
        assert event.get("spawned") == name, event
        return event["pid"]

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def stop(self) -> list[dict]:
        """End it in order; returns what it still said."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        events = [json.loads(line) for line in self.process.stdout]
        assert self.process.wait(PATIENCE_S) == 0
        self.process.stdout.close()
        return events


@dataclass(frozen=True)
class Machine:
    """A zygote, and the Redis, the store and the folder that its nodes share."""

    zygote: Zygote
    redis: RedisServer
    store: LocalStore
    folder: Path


@contextmanager
def machine_of(cluster: str, folder: Path) -> Iterator[Machine]:
    store = LocalStore(folder / "store")

    async def prepare() -> None:
        await store.claim(cluster)
        async with RedisState.connect(redis.url) as state:
            await state.cluster_config(ClusterConfig(cluster_id=cluster, store_url=store.url))

    with running_redis(folder) as redis:
        asyncio.run(prepare())
        zygote = Zygote(folder, redis.url)
        try:
            yield Machine(zygote, redis, store, folder)
        finally:
            if zygote.process.poll() is None:
                zygote.stop()


async def joined(state: RedisState, name: str) -> NodeRecord:
    """The record of a node, once it has joined."""
    snapshot = await state.snapshot()
    for up in snapshot.nodes:
        if up.record.id == name:
            return up.record
    async for _, change in state.watch(snapshot.cursor):
        record = getattr(change, "record", None)
        if isinstance(record, NodeRecord) and record.id == name:
            return record
    raise AssertionError("the feed ended")


@contextlib.asynccontextmanager
async def channel_to(record: NodeRecord) -> AsyncIterator[Channel]:
    channel = await Channel.connect(record.channel, SECRET.encode())
    try:
        yield channel
    finally:
        await channel.aclose()


async def ask(channel: Channel, request) -> list:
    async with channel.call(request) as call:
        return [reply async for reply in call]


async def counters(channel: Channel) -> dict[str, int]:
    (status,) = await ask(channel, GetStatus())
    return dict(status.record.counters)


def holder(record: NodeRecord) -> Holder:
    return Holder(node=record.id, host=record.host, cast=record.cast, tier="host")


async def put(store: LocalStore, data: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield data

    await store.append(hashlib.sha256(data).hexdigest(), 0, chunks(), total=len(data))


@dataclass(frozen=True)
class Model:
    """A small model's image, and what a node is told to start it."""

    packed: PackedFolder
    data: bytes
    config: bytes

    def start(self, name: str, *holders: Holder) -> StartInstance:
        return StartInstance(
            instance_id=name,
            function="llama",
            version=1,
            task="generate",
            architecture=self.packed.manifest.architecture,
            dtype="float32",
            context_length=128,
            max_concurrency=4,
            assets={"config.json": self.config},
            image=ImageRef(
                image=self.packed.manifest.sha256,
                manifest=self.packed.manifest_digest,
                nbytes=len(self.data),
                holders=holders,
                manifest_bytes=(self.packed.path / "manifest.json").read_bytes(),
            ),
        )


def make_model(folder: Path, kind: str = "llama") -> Model:
    """Write a checkpoint into the folder, and its image beside it."""
    write_checkpoint(kind, folder)
    packed = pack_to_folder(folder, folder.with_name(f"{folder.name}-packed"))
    data = (packed.path / "image.bin").read_bytes()
    return Model(packed, data, (folder / "config.json").read_bytes())


def generate(instance: str, call_id: str, tokens: int) -> Generate:
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return Generate(request_id=call_id, instance_id=instance, prompt_ids=(3, 4, 5), sampling=sampling)
