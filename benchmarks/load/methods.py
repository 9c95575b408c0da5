"""The loading methods that `benchmarks.load` compares: our loader's and those of others."""

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

from benchmarks.harness.arenas import copy_seconds, make_arena
from benchmarks.harness.no_server import EmptyArena, NullRegionServer
from benchmarks.load.limits import COLD, WARM, LoadMethod, copy_limits
from benchmarks.load.weights import StoredWeights
from invoker.base.counters import Counters
from invoker.device import default_spare_bytes
from invoker.engine.contract import ModelSpec
from invoker.engine.factory import TorchEngineFactory
from invoker.host_tier.tier import HostTier
from invoker.loading.fetch_order import LoadSources
from invoker.loading.loader import ImageLoader
from invoker.loading.published import PublishedImages
from invoker.loading.store_access import StoreAccess
from registry.images.store import LocalStore

TIER_IMAGES = 4  # capacity of a host tier in images, with the node's default pre-faulted buffers
_CONTEXT = 512
_SEQUENCES = 4


def make_loader(tier: HostTier, store: LocalStore) -> ImageLoader:
    """Return a node's loader with a store on this machine's disk."""
    sources = LoadSources(
        node="bench",
        host="bench",
        store=StoreAccess(store=store, label="disk"),
        casts=None,
        arena_reader=lambda image: None,
    )
    published = PublishedImages(NullRegionServer(), tier, EmptyArena())
    return ImageLoader(sources, tier, published, Counters(), lambda: None)


def host_methods(weights: StoredWeights, shm: Path, resident: HostTier) -> list[LoadMethod]:
    """Return the methods from disk to host memory; `resident` is a host tier that holds the image."""
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
        started_s = time.perf_counter()
        mapping = resident.open(weights.manifest.sha256)
        assert mapping is not None
        np.frombuffer(mapping.view, np.uint8)[:: mmap.PAGESIZE].sum()
        seconds = time.perf_counter() - started_s
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

    def method(name: str, mode: str, run: Callable[[], float], *caches: str) -> LoadMethod:
        return LoadMethod(name=name, path="disk-host", mode=mode, run=run, caches=caches or (COLD, WARM))

    return [
        method("hypercast", "loader", lambda: ours(spare)),
        method("hypercast", "loader-fresh", lambda: ours(0)),
        method("safetensors", "load_file", lambda: _timed(file_copied)),
        method("safetensors", "safe_open", lambda: _timed(each_copied)),
        method("transformers", "from_pretrained", lambda: _timed(pretrained)),
        method("safetensors-mapped", "load_file", lambda: _timed(file_mapped)),
        method("hypercast-mapped", "host-tier", ours_mapped, WARM),
    ]


@contextmanager
def resident(weights: StoredWeights, folder: Path) -> Iterator[HostTier]:
    """Provide a host tier that holds the image."""
    tier = HostTier(folder, 2 * weights.manifest.nbytes)
    try:
        fill(tier, weights)
        yield tier
    finally:
        tier.close()


def fill(tier: HostTier, weights: StoredWeights) -> float:
    """Load the image from the store into the tier, and return the seconds."""

    async def load() -> float:
        loader = make_loader(tier, weights.store)
        started_s = time.perf_counter()
        async with loader.open_image(weights.ref, weights.manifest, lambda fraction: None) as arrival:
            await arrival.complete()
            return time.perf_counter() - started_s

    return asyncio.run(load())


@contextmanager
def device_methods(weights: StoredWeights, tier: HostTier, device: str) -> Iterator[list[LoadMethod]]:
    """Return the methods from the tier's image to the device and into an engine there."""
    manifest = weights.manifest
    spec = ModelSpec(manifest=manifest, config=weights.config, dtype="float32", context_length=_CONTEXT)
    engines = TorchEngineFactory()
    kv_bytes = engines.kv_bytes(spec, _SEQUENCES)[1]
    arena = make_arena(device, manifest.nbytes + kv_bytes + (16 << 20))
    mapping = tier.open(manifest.sha256)
    assert mapping is not None
    try:
        region, kv = arena.reserve(manifest.nbytes), arena.reserve(kv_bytes)

        def copied() -> float:
            return asyncio.run(copy_seconds(arena, region, mapping.view))

        def bound() -> float:
            started_s = time.perf_counter()
            engine = engines.make(spec, region, kv, _SEQUENCES)
            seconds = time.perf_counter() - started_s
            engine.close()
            return seconds

        copy = LoadMethod(name="hypercast", path="host-device", mode="arena", run=copied)
        if device == "cpu":
            assert region.buffer is not None
            limits = copy_limits(
                np.frombuffer(mapping.view, np.uint8), np.frombuffer(region.buffer, np.uint8)
            )
        else:
            limits = [_cuda_limit(manifest.nbytes, device)]
        yield [copy, *limits, LoadMethod(name="hypercast", path="bind", mode="engine", run=bound)]
        del limits
    finally:
        mapping.close()
        arena.close()


def _cuda_limit(nbytes: int, device: str) -> LoadMethod:
    """Return one copy of the driver's page-locked memory to torch's memory."""
    source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def run() -> float:
        torch.cuda.synchronize(device)
        started_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        return time.perf_counter() - started_s

    return LoadMethod(name="limit", path="host-device", mode="pinned-copy", run=run)


def _timed(load: Callable[[], object]) -> float:
    """Return the seconds of a load, and release what it loaded."""
    started_s = time.perf_counter()
    loaded = load()
    seconds = time.perf_counter() - started_s
    del loaded
    gc.collect()
    return seconds


def _touch(tensors: Iterable[torch.Tensor]) -> None:
    """Read one byte of each page."""
    for tensor in tensors:
        tensor.detach().reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
