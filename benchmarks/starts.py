"""Measure instance starts from every tier, between two real nodes on virtual hosts of their own.

Packs a random Llama, forks two invokers from a zygote, and in turns starts it cold from disk (its page cache
is dropped first), cold from the other node's host memory, hot and warm. Beside them are limits measured in
the same rounds: a read of the file and a transfer over one loopback socket into mapped memory, and a copy
within memory. A start's seconds are those of the whole call; `phases_ms` are the node's own medians.

example:
  python -m benchmarks.starts --rounds 3 --layers 2 --json starts.json
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

from benchmarks.harness.arguments import at_least, benchmark_parser
from benchmarks.harness.processes import ROOT
from benchmarks.harness.random_llama import write_random_llama
from benchmarks.harness.records import describe_run, recording
from registry.channel.client import Channel
from registry.images.manifest import Manifest
from registry.images.pack import pack_to_folder
from registry.images.store import LocalStore
from registry.messages.node import (
    DropImage,
    ImageHolder,
    ImageRef,
    InstanceStarted,
    Reply,
    Request,
    StartInstance,
    StopInstance,
)
from registry.records.change import Change, NodeUp
from registry.records.node import NodeRecord
from registry.redis.embedded import EmbeddedRedis
from registry.redis.state import RedisState
from registry.state import ClusterConfig

TOKENIZER = ROOT / "functions" / "tiny-coder" / "model"
CHUNK_BYTES = 4 << 20
KINDS = ("cold-disk", "cold-peer", "hot", "warm")


@dataclass(frozen=True, slots=True)
class PackedModel:
    """The model to start: a packed checkpoint and its blob in the store."""

    manifest: Manifest
    encoded: bytes
    digest: str
    config: bytes
    blob: Path

    def request(self, instance: str, *holders: ImageHolder) -> StartInstance:
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
class ForkedNode:
    """A node and the channel to it."""

    record: NodeRecord
    channel: Channel

    async def call(self, request: Request) -> list[Reply]:
        async with self.channel.call(request) as replies:
            return [reply async for reply in replies]

    @property
    def holder(self) -> ImageHolder:
        return ImageHolder(node=self.record.id, host=self.record.host, cast=self.record.cast, tier="host")


@dataclass(slots=True)
class StartSamples:
    """The rounds of one kind of start, or of one limit."""

    seconds: list[float] = field(default_factory=list)
    phases_ms: list[dict[str, float]] = field(default_factory=list)


# Limits.


def copy_limit(source: np.ndarray, target: np.ndarray) -> float:
    """Time a copy within mapped memory."""
    started_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started_s


def read_limit(blob: Path, target: np.ndarray) -> float:
    """Time a read of a file that is not in the page cache."""
    drop_cache(blob)
    started_s = time.perf_counter()
    with blob.open("rb", buffering=0) as file:
        view, done = target.data, 0
        while done < len(view):
            done += file.readinto(view[done : done + CHUNK_BYTES]) or 0
    return time.perf_counter() - started_s


def socket_limit(source: np.ndarray, target: np.ndarray) -> float:
    """Time a transfer over one loopback connection, one thread at each end, without checks."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            taken, _ = server.accept()
            with taken:
                taken.sendall(source.data)

        sender = threading.Thread(target=send)
        sender.start()
        with socket.create_connection(server.getsockname()) as client:
            started_s = time.perf_counter()
            view, done = target.data, 0
            while done < len(view):
                done += client.recv_into(view[done : done + CHUNK_BYTES])
            took_s = time.perf_counter() - started_s
        sender.join()
    return took_s


def drop_cache(blob: Path) -> None:
    """Drop a file from the page cache."""
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


async def prepare(folder: Path, state: RedisState, cluster: str, layers: int) -> PackedModel:
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
    return PackedModel(
        manifest=packed.manifest,
        encoded=(packed.path / "manifest.json").read_bytes(),
        digest=packed.manifest_digest,
        config=(folder / "checkpoint" / "config.json").read_bytes(),
        blob=folder / "store" / "blobs" / packed.manifest.sha256,
    )


async def wait_for_node(watching: AsyncIterator[tuple[str, Change]], name: str) -> NodeRecord:
    async for _, change in watching:
        if isinstance(change, NodeUp) and change.record.id == name:
            return change.record
    raise RuntimeError(f"the change feed ended before node {name} joined")


@asynccontextmanager
async def node(
    zygote: subprocess.Popen[bytes], redis: EmbeddedRedis, state: RedisState, folder: Path, name: str
) -> AsyncIterator[ForkedNode]:
    """Fork a node on a virtual host of its own, and connect to it."""
    argv = ["--redis-url", redis.url, "--node-id", name, "--host-id", f"host-{name}", "--device", "cpu"]
    argv += ["--gpu-memory", "1GiB", "--host-memory", "1GiB", "--threads", "1"]
    order = {"id": name, "argv": argv, "log": str(folder / f"{name}.log")}
    watching = state.watch((await state.snapshot()).cursor)
    assert zygote.stdin is not None
    zygote.stdin.write(json.dumps({"spawn": order}).encode() + b"\n")
    zygote.stdin.flush()
    record = await wait_for_node(watching, name)
    channel = await Channel.connect(record.channel, os.environ["HYPERCAST_CLUSTER_SECRET"].encode())
    try:
        yield ForkedNode(record, channel)
    finally:
        await channel.aclose()


async def timed_start(node: ForkedNode, request: StartInstance, expected: str, into: StartSamples) -> None:
    started_s = time.perf_counter()
    started = (await node.call(request))[-1]
    into.seconds.append(time.perf_counter() - started_s)
    assert isinstance(started, InstanceStarted) and started.start_kind == expected, started
    into.phases_ms.append(dict(started.phases_ms))


async def one_round(
    number: int, model: PackedModel, source: ForkedNode, target: ForkedNode, samples: dict[str, StartSamples]
) -> None:
    """Start once from every tier; afterwards only the source's host tier holds the image."""
    image = model.manifest.sha256
    for one in (source, target):
        await one.call(DropImage(image=image, tier="host"))
    drop_cache(model.blob)
    name = f"{number}-disk"
    await timed_start(source, model.request(name), "cold", samples["cold-disk"])
    await source.call(StopInstance(instance_id=name))
    peer, hot, warm = (f"{number}-{kind}" for kind in ("peer", "hot", "warm"))
    await timed_start(target, model.request(peer, source.holder), "cold", samples["cold-peer"])
    await timed_start(target, model.request(hot), "hot", samples["hot"])
    for instance in (peer, hot):
        await target.call(StopInstance(instance_id=instance))
    await timed_start(target, model.request(warm), "warm", samples["warm"])
    await target.call(StopInstance(instance_id=warm))


async def measure(folder: Path, rounds: int, layers: int) -> tuple[PackedModel, dict[str, StartSamples]]:
    cluster = f"starts-{os.getpid()}"
    redis = EmbeddedRedis(folder)
    redis.prepare()
    samples = {name: StartSamples() for name in (*KINDS, "limit-copy", "limit-read", "limit-socket")}
    with running(redis.command(), folder / "redis-process.log"):
        await redis.wait_ready(30.0)
        zygote_command = [sys.executable, "-m", "cli.supervise.zygote", "invoker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        async with RedisState.connect(redis.url) as state:
            model = await prepare(folder, state, cluster, layers)
            content = np.fromfile(model.blob, np.uint8)
            into = np.ones_like(content)
            with running(zygote_command, folder / "zygote.log", **pipes) as zygote:
                async with (
                    node(zygote, redis, state, folder, "n0") as source,
                    node(zygote, redis, state, folder, "n1") as target,
                ):
                    for number in range(-1, rounds):
                        current = samples if number >= 0 else {name: StartSamples() for name in samples}
                        await one_round(number, model, source, target, current)
                        current["limit-copy"].seconds.append(copy_limit(content, into))
                        current["limit-read"].seconds.append(read_limit(model.blob, into))
                        current["limit-socket"].seconds.append(socket_limit(content, into))
    return model, samples


# Records.


def record(
    name: str, sample: StartSamples, limit: StartSamples | None, common: dict[str, object]
) -> dict[str, Any]:
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
    """Format a record as one line."""
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
    common = {"rounds": rounds, "bytes": model.manifest.nbytes, **describe_run("benchmarks.starts")}
    limits = {"cold-disk": "limit-read", "cold-peer": "limit-socket", "warm": "limit-copy"}
    return [
        record(name, sample, samples[limits[name]] if name in limits else None, common)
        for name, sample in samples.items()
    ]


def main() -> None:
    parser = benchmark_parser("benchmarks.starts", __doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="rounds")
    parser.add_argument("--layers", type=at_least(1), default=5, help="layers of the model, about 51 MB each")
    args = parser.parse_args()
    with recording("starts", json=args.json, show=show) as out:
        out.add(*run(args.rounds, args.layers))


if __name__ == "__main__":
    main()
