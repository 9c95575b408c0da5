"""The ways of weights into memory that `benchmarks.load` compares: our loader's, and those of others."""

import asyncio
import gc
import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.load_limits import COLD, WARM, Way, copy_limits
from benchmarks.load_weights import StoredWeights
from benchmarks.no_server import NoServer
from invoker.arena import Arena, CpuArena, Region, copy_following
from invoker.counters import Counters
from invoker.cuda_arena import CudaArena
from invoker.device import default_spare_bytes
from invoker.engine.contract import ModelSpec
from invoker.engines import RealEngines
from invoker.host_tier import HostTier
from invoker.loader import ImageLoader
from invoker.published import PublishedImages
from invoker.store_access import StoreAccess
from rdmacast.connector import Connector
from registry.images.store import LocalStore

TIER_IMAGES = 4  # for so many images there is room in a host tier, whose spare is that of the node's defaults
_CONTEXT = 512
_SEQUENCES = 4


def make_loader(tier: HostTier, store: LocalStore) -> ImageLoader:
    """A node's loader, with a store on this machine's disk."""
    return ImageLoader(
        node="bench",
        host="bench",
        tier=tier,
        published=PublishedImages(NoServer(), tier, lambda image: None),
        store=StoreAccess(store=store, label="disk"),
        connector=Connector("bench", []),
        casting=None,
        in_arena=lambda image: None,
        counters=Counters(),
        changed=lambda: None,
    )


def host_ways(weights: StoredWeights, shm: Path, resident: HostTier) -> list[Way]:
    """Ways from disk to host memory; `resident` is a host tier that has the image."""
    file = weights.safetensors
    spare = default_spare_bytes(TIER_IMAGES * weights.manifest.nbytes, 1)

    def ours(spare_bytes: int) -> float:
        tier = HostTier(
            shm / "tiers" / "fresh", TIER_IMAGES * weights.manifest.nbytes, spare_bytes=spare_bytes
        )
        try:
            tier.wait_for_spare()
            return fill(tier, weights)
        finally:
            tier.close()

    def ours_mapped() -> float:
        began_s = time.perf_counter()
        mapping = resident.open(weights.manifest.sha256)
        assert mapping is not None
        np.frombuffer(mapping.view, np.uint8)[:: mmap.PAGESIZE].sum()
        seconds = time.perf_counter() - began_s
        mapping.close()
        return seconds

    def file_copied() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in load_file(file).items()}

    def each_copied() -> dict[str, torch.Tensor]:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118

    def file_mapped() -> dict[str, torch.Tensor]:
        tensors = load_file(file)
        _touch(tensors.values())
        return tensors

    def pretrained() -> torch.nn.Module:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(weights.checkpoint, dtype=torch.float32)
        _touch(model.parameters())
        return model

    def way(name: str, mode: str, run: Callable[[], float], *caches: str) -> Way:
        return Way(name=name, path="disk-host", mode=mode, run=run, caches=caches or (COLD, WARM))

    return [
        way("hypercast", "loader", lambda: ours(spare)),
        way("hypercast", "loader-fresh", lambda: ours(0)),
        way("safetensors", "load_file", lambda: _timed(file_copied)),
        way("safetensors", "safe_open", lambda: _timed(each_copied)),
        way("transformers", "from_pretrained", lambda: _timed(pretrained)),
        way("safetensors-mapped", "load_file", lambda: _timed(file_mapped)),
        way("hypercast-mapped", "host-tier", ours_mapped, WARM),
    ]


@contextmanager
def resident(weights: StoredWeights, folder: Path) -> Iterator[HostTier]:
    """A host tier that has the image."""
    tier = HostTier(folder, 2 * weights.manifest.nbytes)
    try:
        fill(tier, weights)
        yield tier
    finally:
        tier.close()


def fill(tier: HostTier, weights: StoredWeights) -> float:
    """Bring the image from the store into the tier; the seconds."""

    async def load() -> float:
        loader = make_loader(tier, weights.store)
        began_s = time.perf_counter()
        async with loader.arriving(weights.ref, weights.manifest, lambda fraction: None) as arrival:
            await arrival.complete()
            return time.perf_counter() - began_s

    return asyncio.run(load())


@contextmanager
def device_ways(weights: StoredWeights, tier: HostTier, device: str) -> Iterator[list[Way]]:
    """Ways of the tier's image to the device and into an engine there."""
    manifest = weights.manifest
    spec = ModelSpec(manifest=manifest, config=weights.config, dtype="float32", context_length=_CONTEXT)
    engines = RealEngines()
    kv_bytes = engines.kv_bytes(spec, _SEQUENCES)[1]
    arena = _arena(device, manifest.nbytes + kv_bytes + (16 << 20))
    mapping = tier.open(manifest.sha256)
    assert mapping is not None
    try:
        region, kv = arena.reserve(manifest.nbytes), arena.reserve(kv_bytes)

        def copied() -> float:
            with arena.pinned(mapping.view):
                return _copy(arena, region, mapping.view)

        def pinned_and_copied() -> float:
            began_s = time.perf_counter()
            copied()
            return time.perf_counter() - began_s

        def bound() -> float:
            began_s = time.perf_counter()
            engine = engines.make(spec, region, kv, _SEQUENCES)
            seconds = time.perf_counter() - began_s
            engine.close()
            return seconds

        copies = [Way(name="hypercast", path="host-device", mode="arena", run=copied)]
        if device == "cpu":
            assert region.buffer is not None
            limits = copy_limits(
                np.frombuffer(mapping.view, np.uint8), np.frombuffer(region.buffer, np.uint8)
            )
        else:
            mode = "pin-and-copy"
            copies.append(Way(name="hypercast", path="host-device", mode=mode, run=pinned_and_copied))
            limits = [_cuda_limit(manifest.nbytes, device)]
        yield [*copies, *limits, Way(name="hypercast", path="bind", mode="engine", run=bound)]
        del limits
    finally:
        mapping.close()
        arena.close()


def _copy(arena: Arena, region: Region, view: memoryview) -> float:
    async def copy() -> float:
        began_s = time.perf_counter()
        await copy_following(arena, region, view, _there, lambda nbytes: None)
        return time.perf_counter() - began_s

    return asyncio.run(copy())


async def _there(offset: int, nbytes: int) -> None:
    """All of it is."""


def _cuda_limit(nbytes: int, device: str) -> Way:
    """One copy of page-locked memory of the driver's own to memory of torch's."""
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def run() -> float:
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        return time.perf_counter() - began_s

    return Way(name="limit", path="host-device", mode="pinned-copy", run=run)


def _arena(device: str, nbytes: int) -> Arena:
    if device == "cpu":
        return CpuArena(nbytes)
    return CudaArena(int(device.partition(":")[2] or 0), nbytes)


def _timed(load: Callable[[], object]) -> float:
    """The seconds of a load; what it loaded is gone when this returns."""
    began_s = time.perf_counter()
    loaded = load()
    seconds = time.perf_counter() - began_s
    del loaded
    gc.collect()
    return seconds


def _touch(tensors: Iterable[torch.Tensor]) -> None:
    """Read a byte of each page, so that it is in memory."""
    for tensor in tensors:
        tensor.detach().reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
