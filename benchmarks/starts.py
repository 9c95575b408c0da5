"""Measure instance starts from every tier, between two real nodes on virtual hosts of their own.

Packs a random Llama, forks two invokers from a zygote, and in turns starts it cold from disk (its page cache
is dropped first), cold from the other node's arena, hot, and warm from a host copy. A third node loads it
into host memory from its disk tier (`disk-tier`), thrice a round, without a read of the store, which its
counters prove. Beside them are limits measured in the same rounds: a read of the file, also around the page
cache (by one thread, and by as many as a node has), a transfer over one loopback socket into mapped memory,
and a copy within memory. A start's seconds are those of the whole call; `phases_ms` are the node's own
medians.

example:
  python -m benchmarks.starts --rounds 3 --layers 2 --json starts.json
"""

import asyncio
import json
import mmap
import os
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness.arguments import at_least, benchmark_parser
from benchmarks.harness.forked_cluster import PATIENCE_S, ForkedCluster
from benchmarks.harness.processes import ROOT
from benchmarks.harness.records import describe_run, recording, timed
from benchmarks.load.weights import StoredWeights, drop_from_cache, stored
from registry.channel.client import Channel
from registry.messages.images import DropImage, ImageHolder, WarmImage
from registry.messages.node import (
    InstanceStarted,
    Reply,
    Request,
    StartInstance,
    StopInstance,
)
from registry.records.change import NodeUp
from registry.records.node import NodeRecord, Tier
from registry.redis.state import RedisState
from registry.state import ClusterConfig

TOKENIZER = ROOT / "functions" / "tiny-coder" / "model"
CHUNK_BYTES = 4 << 20
DIRECT_READERS, DIRECT_BYTES = 6, 16 << 20  # the bytes of a node's reads
DISK_LOADS = 3  # a round: times of a disk vary by a third
KINDS = ("cold-disk", "cold-peer", "hot", "warm", "disk-tier")
READ_COUNTERS = ("disk_cache_read_bytes", "disk_read_bytes", "store_read_bytes", "cast_recv_bytes")
LIMITS = ("limit-copy", "limit-read", "limit-direct", "limit-direct-parallel", "limit-socket")


def start_request(weights: StoredWeights, instance: str, *holders: ImageHolder) -> StartInstance:
    """Return the order to start an instance of these weights, held by `holders`."""
    return StartInstance(
        instance_id=instance,
        function="random",
        version=1,
        task="generate",
        dtype="float32",
        context_length=512,
        max_concurrency=4,
        assets={"config.json": json.dumps(weights.config).encode()},
        image=msgspec.structs.replace(weights.ref, holders=holders),
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
        return ImageHolder(node=self.record.id, host=self.record.host, cast=self.record.cast, tier=Tier.GPU)


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
    drop_from_cache(blob)
    started_s = time.perf_counter()
    with blob.open("rb", buffering=0) as file:
        view, done = target.data, 0
        while done < len(view):
            done += file.readinto(view[done : done + CHUNK_BYTES]) or 0
    return time.perf_counter() - started_s


@contextmanager
def huge_buffer(nbytes: int) -> Iterator[mmap.mmap]:
    """Yield populated memory for a whole image, in huge pages where there are any."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as buffer:
        buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer.write(bytes(nbytes))
        yield buffer


def direct_limit(blob: Path, into: mmap.mmap, readers: int) -> float:
    """Time a read of a file around the page cache, by so many threads."""
    drop_from_cache(blob)
    offsets = iter(range(0, blob.stat().st_size, DIRECT_BYTES))
    descriptor = os.open(blob, os.O_RDONLY | os.O_DIRECT)
    whole = memoryview(into)

    def read() -> None:
        for offset in offsets:
            with whole[offset : offset + DIRECT_BYTES] as part:
                os.preadv(descriptor, [part], offset)

    try:
        with whole, ThreadPoolExecutor(readers) as pool:
            started_s = time.perf_counter()
            for reading in [pool.submit(read) for _ in range(readers)]:
                reading.result()
            return time.perf_counter() - started_s
    finally:
        os.close(descriptor)


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


# The cluster.


async def prepare(cluster: ForkedCluster, layers: int) -> StoredWeights:
    """Put the image into the store of a new cluster."""
    weights = await stored(cluster.folder, TOKENIZER, layers)
    await weights.store.claim(cluster.folder.name)
    async with RedisState.connect(cluster.redis.url) as state:
        config = ClusterConfig(cluster_id=cluster.folder.name, store_url=weights.store.url)
        await state.cluster_config(config)
    return weights


@asynccontextmanager
async def node(
    cluster: ForkedCluster, name: str, memory_bytes: int, *flags: object
) -> AsyncIterator[ForkedNode]:
    """Fork a node on a virtual host of its own, and connect to it."""
    memory = ("--gpu-memory", memory_bytes, "--host-memory", memory_bytes)
    cluster.start_node(name, f"host-{name}", "--device", "cpu", *memory, "--threads", 1, *flags)
    (record,) = await cluster.registered(name)
    channel = await Channel.connect(record.channel, cluster.secret)
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


async def until_idle(cluster: ForkedCluster, image: str) -> None:
    """Return once all nodes have checked the image and populated the memory for the next one."""
    folder = Path("/dev/shm") / f"hypercast-{cluster.folder.name}"
    async with RedisState.connect(cluster.redis.url) as state, asyncio.timeout(PATIENCE_S):
        while True:
            records = [node.record for node in (await state.snapshot()).nodes]
            held = [one for record in records for one in record.holdings if one.image == image]
            spares = [spare.stat() for spare in folder.glob("*/*.spare")]
            is_checked = all(one.settled for one in held if Tier.HOST in one.tiers)
            if is_checked and all(one.st_blocks * 512 >= one.st_size for one in spares):
                return
            await asyncio.sleep(0.05)


async def drop(node: ForkedNode, image: str, *tiers: Tier) -> None:
    """Drop an image that no instance uses from tiers of a node, if they have it."""
    for tier in tiers:
        await node.call(DropImage(image=image, tier=tier))


class DiskTier:
    """The image in a node's disk tier: `file`, written once the node had verified what the store gave it.

    `counters` are the node's, of its last settled record.
    """

    def __init__(self, cluster: ForkedCluster, weights: StoredWeights, node: ForkedNode) -> None:
        self._cluster = cluster
        self._weights = weights
        self._node = node
        self.counters: Mapping[str, int] = {}

    @property
    def file(self) -> Path:
        (path,) = self._cluster.folder.glob(f"disk/*/*/{self._weights.manifest.sha256}")
        return path

    async def fill(self) -> None:
        """Load the image from the store, and wait until it is on the disk."""
        await self._load()
        assert self.counters["disk_read_bytes"] == self._weights.manifest.nbytes, self.counters

    async def timed_load(self) -> float:
        """Load the image into host memory from the disk tier alone; return the seconds."""
        before = self.counters
        await drop(self._node, self._weights.manifest.sha256, Tier.HOST)
        drop_from_cache(self.file)
        await until_idle(self._cluster, self._weights.manifest.sha256)
        took_s = await self._load()
        read = {name: self.counters[name] - before[name] for name in READ_COUNTERS}
        assert read == dict.fromkeys(READ_COUNTERS, 0) | {
            "disk_cache_read_bytes": self._weights.manifest.nbytes
        }, read
        return took_s

    async def _load(self) -> float:
        """Load the image; the node is idle again when this returns: it has checked the whole image."""
        async with RedisState.connect(self._cluster.redis.url) as state, asyncio.timeout(PATIENCE_S):
            cursor = (await state.snapshot()).cursor
            started_s = time.perf_counter()
            await self._node.call(WarmImage(image=self._weights.ref))
            took_s = time.perf_counter() - started_s
            async for _, change in state.watch(cursor):
                if isinstance(change, NodeUp) and change.record.id == self._node.record.id:
                    held = {Tier.HOST, Tier.DISK}
                    if any(one.settled and held <= set(one.tiers) for one in change.record.holdings):
                        self.counters = change.record.counters
                        break
        return took_s


async def one_round(
    number: int,
    weights: StoredWeights,
    source: ForkedNode,
    target: ForkedNode,
    samples: dict[str, StartSamples],
) -> None:
    """Start once from every tier, and drop the images, which nodes keep after the instances.

    What is not dropped is checked in the background, which would take processor time from what follows.
    """
    image = weights.manifest.sha256
    drop_from_cache(weights.blob)
    name = f"{number}-disk"
    await timed_start(source, start_request(weights, name), "cold", samples["cold-disk"])
    await source.call(StopInstance(instance_id=name))
    peer, hot, warm = (f"{number}-{kind}" for kind in ("peer", "hot", "warm"))
    await timed_start(target, start_request(weights, peer, source.holder), "cold", samples["cold-peer"])
    await timed_start(target, start_request(weights, hot), "hot", samples["hot"])
    for instance in (peer, hot):
        await target.call(StopInstance(instance_id=instance))
    await target.call(WarmImage(image=weights.ref))  # a cold start goes past host memory
    await drop(target, image, Tier.GPU)
    await timed_start(target, start_request(weights, warm), "warm", samples["warm"])
    await target.call(StopInstance(instance_id=warm))
    for one in (source, target):
        await drop(one, image, Tier.GPU, Tier.HOST)


async def measure(
    cluster: ForkedCluster, rounds: int, layers: int
) -> tuple[StoredWeights, dict[str, StartSamples]]:
    samples = {name: StartSamples() for name in (*KINDS, *LIMITS)}
    weights = await prepare(cluster, layers)
    content = np.fromfile(weights.blob, np.uint8)
    into = np.ones_like(content)
    memory_bytes = 2 * len(content) + (1 << 29)  # a second image may come before the first one goes
    disk = ("--disk-cache", memory_bytes, "--disk-cache-dir", cluster.folder / "disk")
    async with (
        AsyncExitStack() as stack,
        node(cluster, "n0", memory_bytes) as source,
        node(cluster, "n1", memory_bytes) as target,
        node(cluster, "n2", memory_bytes, *disk) as cached,
    ):
        direct = stack.enter_context(huge_buffer(len(content)))
        disk_tier = DiskTier(cluster, weights, cached)
        await disk_tier.fill()
        for number in range(-1, rounds):
            current = samples if number >= 0 else {name: StartSamples() for name in samples}
            await one_round(number, weights, source, target, current)
            current["limit-copy"].seconds.append(copy_limit(content, into))
            current["limit-read"].seconds.append(read_limit(weights.blob, into))
            current["limit-socket"].seconds.append(socket_limit(content, into))
            for _ in range(DISK_LOADS):
                current["disk-tier"].seconds.append(await disk_tier.timed_load())
                await until_idle(cluster, weights.manifest.sha256)
                current["limit-direct"].seconds.append(direct_limit(disk_tier.file, direct, 1))
                parallel = direct_limit(disk_tier.file, direct, DIRECT_READERS)
                current["limit-direct-parallel"].seconds.append(parallel)
    return weights, samples


# Records.


def record(
    name: str, sample: StartSamples, limit: StartSamples | None, common: dict[str, object]
) -> dict[str, Any]:
    nbytes = common["bytes"]
    assert isinstance(nbytes, int)
    limit_s = None if limit is None else statistics.median(limit.seconds)
    found = timed(name, common, sample.seconds, limit_s)
    found["gb_per_s"] = nbytes / found["median_s"] / 1e9
    if sample.phases_ms:
        phases = sorted({phase for phases in sample.phases_ms for phase in phases})
        found["phases_ms"] = {
            phase: statistics.median(row.get(phase, 0.0) for row in sample.phases_ms) for phase in phases
        }
    return found


def show(row: dict[str, Any]) -> str:
    """Format a record as one line."""
    limit = f" {row['ratio_to_limit']:6.2f} x its limit" if "limit_s" in row else ""
    phases = ", ".join(f"{phase} {ms:.0f}" for phase, ms in row.get("phases_ms", {}).items() if ms >= 1)
    return f"{row['name']:21} {row['median_s'] * 1e3:8.1f} ms {row['gb_per_s']:6.2f} GB/s{limit}  {phases}"


def run(rounds: int, layers: int) -> list[dict[str, Any]]:
    with TemporaryDirectory(prefix="hypercast-starts-") as folder, ForkedCluster(Path(folder)) as cluster:
        weights, samples = asyncio.run(measure(cluster, rounds, layers))
    common = {"rounds": rounds, "bytes": weights.manifest.nbytes, **describe_run("benchmarks.starts")}
    limits = {
        "cold-disk": "limit-read",
        "cold-peer": "limit-socket",
        "warm": "limit-copy",
        "disk-tier": "limit-direct",
    }
    return [
        record(name, sample, samples[limits[name]] if name in limits else None, common)
        for name, sample in samples.items()
    ]


def main() -> None:
    parser = benchmark_parser("benchmarks.starts", __doc__)
    parser.add_argument("--rounds", type=at_least(1), default=9, help="rounds")
    parser.add_argument("--layers", type=at_least(1), default=5, help="layers of the model, about 51 MB each")
    args = parser.parse_args()
    with recording("starts", json=args.json, show=show) as out:
        out.add(*run(args.rounds, args.layers))


if __name__ == "__main__":
    main()
