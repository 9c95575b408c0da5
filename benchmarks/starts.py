"""Starts of an instance from every tier, between two real nodes on virtual hosts of their own.

`python -m benchmarks.starts --json FILE` packs a random Llama, forks two invokers from a zygote, and
in turns starts it cold from disk (the page cache is emptied of it first), cold from the other node's
host memory, hot and warm. Beside them stand limits measured in the same rounds: a read of the file
and a transfer over one loopback socket into memory that is mapped already, and a copy within memory.
A start's seconds are those of the whole call; `phases_ms` are the node's own, medians.
"""

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import at_least, parser_of
from benchmarks.endings import end_politely
from benchmarks.machine import ROOT, describe_machine, tell_records
from benchmarks.random_llama import write_random_llama
from registry.change import Change, NodeUp
from registry.channel import Channel
from registry.embedded_redis import EmbeddedRedis
from registry.images.manifest import Manifest
from registry.images.pack import pack_to_folder
from registry.images.store import LocalStore
from registry.messages import (
    DropImage,
    Holder,
    ImageRef,
    InstanceStarted,
    Reply,
    Request,
    StartInstance,
    StopInstance,
)
from registry.node import NodeRecord
from registry.redis_state import RedisState
from registry.state import ClusterConfig

TOKENIZER = ROOT / "functions" / "tiny-coder" / "model"
CHUNK_BYTES = 4 << 20
KINDS = ("cold-disk", "cold-peer", "hot", "warm")


@dataclass(frozen=True, slots=True)
class Model:
    """What is started: a packed checkpoint, and its blob in the store."""

    manifest: Manifest
    encoded: bytes
    digest: str
    config: bytes
    blob: Path

    def request(self, instance: str, *holders: Holder) -> StartInstance:
        image = ImageRef(
            image=self.manifest.sha256,
            manifest=self.digest,
            nbytes=self.manifest.nbytes,
            holders=holders,
            manifest_bytes=self.encoded,
        )
        return StartInstance(
            instance_id=instance,
            function="random",
            version=1,
            task="generate",
            architecture=self.manifest.architecture,
            dtype="float32",
            context_length=512,
            max_concurrency=4,
            assets={"config.json": self.config},
            image=image,
        )


@dataclass(slots=True)
class Node:
    """A node and a channel to it."""

    record: NodeRecord
    channel: Channel

    async def ask(self, request: Request) -> list[Reply]:
        async with self.channel.call(request) as replies:
            return [reply async for reply in replies]

    @property
    def holder(self) -> Holder:
        return Holder(node=self.record.id, host=self.record.host, cast=self.record.cast, tier="host")


@dataclass(slots=True)
class Sample:
    """The rounds of one kind of start, or of one limit."""

    seconds: list[float] = field(default_factory=list)
    phases_ms: list[dict[str, float]] = field(default_factory=list)


# Limits.


def copy_limit(source: np.ndarray, target: np.ndarray) -> float:
    """Copy within memory that is mapped already."""
    began_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began_s


def read_limit(blob: Path, target: np.ndarray) -> float:
    """Read a file that is not in the page cache."""
    drop_cache(blob)
    began_s = time.perf_counter()
    with blob.open("rb", buffering=0) as file:
        view, done = target.data, 0
        while done < len(view):
            done += file.readinto(view[done : done + CHUNK_BYTES]) or 0
    return time.perf_counter() - began_s


def socket_limit(source: np.ndarray, target: np.ndarray) -> float:
    """One loopback connection, one thread at each end, nothing checked."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            taken, _ = server.accept()
            with taken:
                taken.sendall(source.data)

        sender = threading.Thread(target=send)
        sender.start()
        with socket.create_connection(server.getsockname()) as client:
            began_s = time.perf_counter()
            view, done = target.data, 0
            while done < len(view):
                done += client.recv_into(view[done : done + CHUNK_BYTES])
            took_s = time.perf_counter() - began_s
        sender.join()
    return took_s


def drop_cache(blob: Path) -> None:
    """Have the kernel forget what it cached of a file."""
    with blob.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# The cluster.


@contextmanager
def running(command: list[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, stderr=output, cwd=ROOT, **options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def prepare(folder: Path, state: RedisState, cluster: str, layers: int) -> Model:
    write_random_llama(folder / "checkpoint", TOKENIZER, layers)
    packed = pack_to_folder(folder / "checkpoint", folder / "packed")
    store = LocalStore(folder / "store")
    await store.claim(cluster)
    await state.cluster_config(ClusterConfig(cluster_id=cluster, store_url=store.url))
    image = packed.path / "image.bin"

    async def chunks() -> AsyncIterator[bytes]:
        with image.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    await store.append(packed.manifest.sha256, 0, chunks(), total=packed.manifest.nbytes)
    return Model(
        manifest=packed.manifest,
        encoded=(packed.path / "manifest.json").read_bytes(),
        digest=packed.manifest_digest,
        config=(folder / "checkpoint" / "config.json").read_bytes(),
        blob=folder / "store" / "blobs" / packed.manifest.sha256,
    )


async def joined(watching: AsyncIterator[tuple[str, Change]], name: str) -> NodeRecord:
    async for _, change in watching:
        if isinstance(change, NodeUp) and change.record.id == name:
            return change.record
    raise RuntimeError("the feed ended")


@asynccontextmanager
async def node(
    zygote: subprocess.Popen[bytes], redis: EmbeddedRedis, state: RedisState, folder: Path, name: str
) -> AsyncIterator[Node]:
    """Fork a node on a virtual host of its own, and connect to it."""
    argv = ["--redis-url", redis.url, "--node-id", name, "--host-id", f"host-{name}", "--device", "cpu"]
    argv += ["--gpu-memory", "1GiB", "--host-memory", "1GiB", "--threads", "1"]
    order = {"id": name, "argv": argv, "log": str(folder / f"{name}.log")}
    watching = state.watch((await state.snapshot()).cursor)
    assert zygote.stdin is not None
    zygote.stdin.write(json.dumps({"spawn": order}).encode() + b"\n")
    zygote.stdin.flush()
    record = await joined(watching, name)
    channel = await Channel.connect(record.channel, os.environ["HYPERCAST_CLUSTER_SECRET"].encode())
    try:
        yield Node(record, channel)
    finally:
        await channel.aclose()


async def timed_start(node: Node, request: StartInstance, expected: str, into: Sample) -> None:
    began_s = time.perf_counter()
    started = (await node.ask(request))[-1]
    into.seconds.append(time.perf_counter() - began_s)
    assert isinstance(started, InstanceStarted) and started.start_kind == expected, started
    into.phases_ms.append(dict(started.phases_ms))


async def one_round(number: int, model: Model, giver: Node, taker: Node, samples: dict[str, Sample]) -> None:
    """Every kind of start once; afterwards only the giver's host tier holds the image."""
    image = model.manifest.sha256
    for one in (giver, taker):
        await one.ask(DropImage(image=image, tier="host"))
    drop_cache(model.blob)
    name = f"{number}-disk"
    await timed_start(giver, model.request(name), "cold", samples["cold-disk"])
    await giver.ask(StopInstance(instance_id=name))
    peer, hot, warm = (f"{number}-{kind}" for kind in ("peer", "hot", "warm"))
    await timed_start(taker, model.request(peer, giver.holder), "cold", samples["cold-peer"])
    await timed_start(taker, model.request(hot), "hot", samples["hot"])
    for instance in (peer, hot):
        await taker.ask(StopInstance(instance_id=instance))
    await timed_start(taker, model.request(warm), "warm", samples["warm"])
    await taker.ask(StopInstance(instance_id=warm))


async def measure(folder: Path, rounds: int, layers: int) -> tuple[Model, dict[str, Sample]]:
    cluster = f"starts-{os.getpid()}"
    redis = EmbeddedRedis(folder)
    redis.prepare()
    samples = {name: Sample() for name in (*KINDS, "limit-copy", "limit-read", "limit-socket")}
    with running(redis.command(), folder / "redis-process.log"):
        await redis.wait_ready(30.0)
        zygote_command = [sys.executable, "-m", "cli.zygote", "invoker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        async with RedisState.connect(redis.url) as state:
            model = await prepare(folder, state, cluster, layers)
            source = np.fromfile(model.blob, np.uint8)
            target = np.ones_like(source)
            with running(zygote_command, folder / "zygote.log", **pipes) as zygote:
                async with (
                    node(zygote, redis, state, folder, "n0") as giver,
                    node(zygote, redis, state, folder, "n1") as taker,
                ):
                    for number in range(-1, rounds):
                        current = samples if number >= 0 else {name: Sample() for name in samples}
                        await one_round(number, model, giver, taker, current)
                        current["limit-copy"].seconds.append(copy_limit(source, target))
                        current["limit-read"].seconds.append(read_limit(model.blob, target))
                        current["limit-socket"].seconds.append(socket_limit(source, target))
    return model, samples


# What is told.


def record(name: str, sample: Sample, limit: Sample | None, common: dict[str, object]) -> dict[str, Any]:
    nbytes = common["bytes"]
    assert isinstance(nbytes, int)
    median_s = statistics.median(sample.seconds)
    found: dict[str, Any] = {
        "name": name,
        "params": common,
        "seconds": sample.seconds,
        "median_s": median_s,
        "gb_per_s": nbytes / median_s / 1e9,
    }
    if sample.phases_ms:
        phases = sorted({phase for phases in sample.phases_ms for phase in phases})
        found["phases_ms"] = {
            phase: statistics.median(row.get(phase, 0.0) for row in sample.phases_ms) for phase in phases
        }
    if limit is not None:
        limit_s = statistics.median(limit.seconds)
        found |= {"limit_s": limit_s, "ratio_to_limit": median_s / limit_s}
    return found


def show(row: dict[str, Any]) -> str:
    """One line for people."""
    limit = f" {row['ratio_to_limit']:6.2f} x its limit" if "limit_s" in row else ""
    phases = ", ".join(f"{phase} {ms:.0f}" for phase, ms in row.get("phases_ms", {}).items() if ms >= 1)
    return f"{row['name']:13} {row['median_s'] * 1e3:8.1f} ms {row['gb_per_s']:6.2f} GB/s{limit}  {phases}"


def run(rounds: int, layers: int) -> list[dict[str, Any]]:
    os.environ["HYPERCAST_CLUSTER_SECRET"] = secrets.token_hex(16)
    folder = Path(tempfile.mkdtemp(prefix="hypercast-starts-"))
    try:
        model, samples = asyncio.run(measure(folder, rounds, layers))
    finally:
        shutil.rmtree(folder)
    common = {"rounds": rounds, "bytes": model.manifest.nbytes, **describe_machine("benchmarks.starts")}
    limits = {"cold-disk": "limit-read", "cold-peer": "limit-socket", "warm": "limit-copy"}
    return [
        record(name, sample, samples[limits[name]] if name in limits else None, common)
        for name, sample in samples.items()
    ]


def main() -> None:
    end_politely()
    parser = parser_of("benchmarks.starts", __doc__)
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--layers", type=at_least(1), default=5, help="of about 51 MB each")
    args = parser.parse_args()
    rows = run(args.rounds, args.layers)
    tell_records(rows, show, args.json)


if __name__ == "__main__":
    main()
