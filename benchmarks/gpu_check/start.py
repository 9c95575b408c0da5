"""Instance starts by the node's own code, phase by phase: from the host tier, and hot."""

import asyncio
import gc
import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from transformers import LlamaConfig

from benchmarks.gpu_check.memory import host_folder
from benchmarks.gpu_check.parts import PartTask, Row, release_cached_memory, row
from benchmarks.harness.arenas import make_arena
from benchmarks.harness.no_server import NullRegionServer
from benchmarks.harness.random_model import RandomModel, llama_8b, random_model
from invoker.base.counters import Counters
from invoker.base.errors import InvalidWork
from invoker.engine.contract import NewSequence
from invoker.engine.factory import TorchEngineFactory
from invoker.engine.runner import UNBILLED
from invoker.host_tier.tier import HostTier
from invoker.instances.device_cache import DeviceCache
from invoker.instances.instance import Instance, ModelRunner
from invoker.instances.load_feed import LoadFeed
from invoker.instances.manager import Instances
from invoker.instances.start_context import InstanceContext
from invoker.loading.engine_images import EngineImages
from invoker.loading.fetch_order import LoadSources
from invoker.loading.loader import ImageLoader
from invoker.loading.published import PublishedImages
from invoker.memory.arena import Arena
from invoker.metering.meter import GpuMeter
from registry.clock import SystemClock
from registry.images.codec import encode_manifest
from registry.images.verify import unit_checksums
from registry.memory.state import MemoryState
from registry.messages.images import ImageRef
from registry.messages.node import StartInstance
from registry.messages.sampling import Sampling
from registry.records.instance import InstanceState

_ROUNDS = 3
_CONTEXT = 512
_SEQUENCES = 8
_KEPT_S = 600.0  # keeps an image in the arena until it is dropped
_PROMPT = tuple(range(3, 35))
_TOKENS = 16


def check(task: PartTask) -> list[Row]:
    """Return rows of starts: the process's first, from the host tier, and hot."""
    config, dtype = _config(task)
    model = random_model(config, dtype, task.device, context=_CONTEXT)
    content = model.region.bytes.cpu().numpy()
    task.say(f"start: an image of {len(content) / 1e9:.2f} GB")
    request = _request(model, content, dtype)
    del model
    gc.collect()
    release_cached_memory(task.device)
    with host_folder() as folder:
        return asyncio.run(_starts(task, folder, request, content))


def _config(task: PartTask) -> tuple[LlamaConfig, str]:
    config = llama_8b()
    if task.small:
        config.vocab_size, config.hidden_size, config.intermediate_size = 512, 256, 512
        config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 2, 4, 2
        config.head_dim = 64
        return config, "float32"
    config.num_hidden_layers = 8  # 5.6 GB with both ends: writer the host tier takes its time as well
    return config, "bfloat16"


def _request(model: RandomModel, content: np.ndarray, dtype: str) -> StartInstance:
    units = unit_checksums(content.data)
    # The image's own digest is not verified after storage, so that of its checksums can name it.
    sha256 = hashlib.sha256(units).hexdigest()
    manifest = replace(model.spec.manifest, sha256=sha256, units=units)
    encoded = encode_manifest(manifest)
    return StartInstance(
        instance_id="",
        function="gpu-check",
        version=1,
        task="generate",
        dtype=dtype,
        context_length=_CONTEXT,
        max_concurrency=_SEQUENCES,
        assets={"config.json": json.dumps(model.spec.config).encode()},
        image=ImageRef(
            image=sha256,
            manifest=hashlib.sha256(encoded).hexdigest(),
            nbytes=manifest.nbytes,
            manifest_bytes=encoded,
        ),
        host_copy=True,
    )


async def _starts(task: PartTask, folder: Path, request: StartInstance, content: np.ndarray) -> list[Row]:
    assert request.image is not None
    image = request.image
    tier = HostTier(folder / "tiers" / "gpu-check", image.nbytes)
    arena = make_arena(task.device, image.nbytes + ((64 << 20) if task.small else (8 << 30)))
    rows: list[Row] = []
    tokens: list[tuple[int, ...]] = []
    try:
        dependencies = _dependencies(arena, tier, content, folder)
        instances = Instances("gpu-check", dependencies, Counters(), published=lambda record: None)
        try:
            for number, kind in enumerate(["cold", *["hot", "warm"] * _ROUNDS]):
                if task.left_s < 5:
                    rows.append(row("start", {"kind": kind}, skipped="no time left"))
                    break
                if kind == "warm":
                    dependencies.device_cache.drop(image.image)  # reload from the host tier
                named = msgspec.structs.replace(request, instance_id=f"{kind}-{number}")
                rows.append(await _start(instances, named, kind, image.nbytes, tokens))
                task.say(f"start: {kind} {rows[-1].get('phases_ms') or rows[-1].get('error')}")
        finally:
            await instances.drain(0.0)
    finally:
        gc.collect()
        arena.close()
        tier.close()
    same = len(set(tokens)) == 1 and len(tokens[0]) == _TOKENS
    return [*rows, row("tokens", {"starts": len(tokens)}, ok=same)]


async def _start(
    instances: Instances, request: StartInstance, kind: str, nbytes: int, tokens: list[tuple[int, ...]]
) -> Row:
    """Start, generate, stop."""
    params: Row = {"kind": kind, "bytes": nbytes, "dtype": request.dtype}
    started_s = time.perf_counter()
    instance = instances.start(request)
    await instance.wait_settled()
    seconds = time.perf_counter() - started_s
    if instance.state is not InstanceState.READY:
        return row("start", params, ok=False, error=instance.life.record.error)
    tokens.append(await _generate(instance))
    found = row(
        "start",
        params,
        ok=instance.life.record.start_kind == kind,
        seconds=[seconds],
        phases_ms={phase: round(ms, 3) for phase, ms in instance.life.record.phases_ms.items()},
        first_call_s=time.perf_counter() - started_s - seconds,
    )
    await instances.stop(request.instance_id, 0.0)
    return found


async def _generate(instance: Instance) -> tuple[int, ...]:
    assert instance.runner is not None
    sequence = NewSequence(
        request_id=instance.id,
        prompt_ids=_PROMPT,
        generated_ids=(),
        sampling=Sampling(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True),
    )
    outputs = [output async for output in instance.runner.generate(sequence, UNBILLED)]
    return tuple(output.token_id for output in outputs if output.token_id is not None)


def _dependencies(arena: Arena, tier: HostTier, content: np.ndarray, scratch: Path) -> InstanceContext:
    """Return a node's dependencies; images missing from the host tier come from `content`."""
    clock = SystemClock()
    device_cache = DeviceCache(arena, _KEPT_S, clock, lambda: None, lambda _: None)

    def read(offset: int, into: memoryview) -> None:
        into[:] = content.data[offset : offset + len(into)]

    sources = LoadSources(
        node="gpu-check",
        host="gpu-check",
        store=None,
        casts=None,
        arena_reader=lambda image: read,
    )
    published = PublishedImages(NullRegionServer(), tier, device_cache)
    loader = ImageLoader(sources, tier, published, Counters(), lambda: None)
    return InstanceContext(
        arena=arena,
        device_cache=device_cache,
        loader=loader,
        engines=TorchEngineFactory(),
        make_handler=None,
        scratch_dir=scratch,
        clock=clock,
        meter=GpuMeter("gpu-check", 1, lambda: time.monotonic_ns() // 1000, clock.wall_s()),
        loads=LoadFeed(clock),
        log_line=lambda function, version, line: None,
        engine_images=EngineImages(loader, MemoryState(), "gpu-check"),
        open_group=_no_group,
    )


async def _no_group(instance: Instance) -> ModelRunner:
    raise InvalidWork(f"instance {instance.id} cannot lead a group: there is one node")
