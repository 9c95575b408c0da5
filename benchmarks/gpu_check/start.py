"""Starts of an instance by the node's own code, phase by phase: from the host tier, and hot."""

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

from benchmarks.gpu_memory import host_folder, make_arena
from benchmarks.gpu_parts import Row, Task, give_back_memory, row
from benchmarks.no_server import NoServer
from benchmarks.random_model import RandomModel, llama_8b, random_model
from invoker.arena import Arena
from invoker.counters import Counters
from invoker.engine.contract import NewSequence
from invoker.engines import RealEngines
from invoker.host_tier import HostTier
from invoker.instance import Instance
from invoker.instances import Instances
from invoker.loader import ImageLoader
from invoker.meter import GpuMeter
from invoker.published import PublishedImages
from invoker.residents import Residents
from invoker.starting import Equipment
from rdmacast.connector import Connector
from registry.clock import SystemClock
from registry.images.codec import encode_manifest
from registry.images.verify import unit_checksums
from registry.instance import InstanceState
from registry.messages import ImageRef, Sampling, StartInstance

_ROUNDS = 3
_CONTEXT = 512
_SEQUENCES = 8
_KEPT_S = 600.0  # an image stays in the arena until it is dropped
_PROMPT = tuple(range(3, 35))
_TOKENS = 16


def check(task: Task) -> list[Row]:
    """Rows of starts: the first of the process, from the host tier, and hot."""
    config, dtype = _config(task)
    model = random_model(config, dtype, task.device, context=_CONTEXT)
    content = model.region.bytes.cpu().numpy()
    task.say(f"start: an image of {len(content) / 1e9:.2f} GB")
    request = _request(model, content, dtype)
    del model
    gc.collect()
    give_back_memory(task.device)
    with host_folder() as folder:
        return asyncio.run(_starts(task, folder, request, content))


def _config(task: Task) -> tuple[LlamaConfig, str]:
    config = llama_8b()
    if task.small:
        config.vocab_size, config.hidden_size, config.intermediate_size = 512, 256, 512
        config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 2, 4, 2
        config.head_dim = 64
        return config, "float32"
    config.num_hidden_layers = 8  # 5.6 GB with both ends: filling the host tier takes its time as well
    return config, "bfloat16"


def _request(model: RandomModel, content: np.ndarray, dtype: str) -> StartInstance:
    units = unit_checksums(content.data)
    # Nobody looks at the image's own digest again once it is stored: that of its checksums names it as well.
    sha256 = hashlib.sha256(units).hexdigest()
    manifest = replace(model.spec.manifest, sha256=sha256, units=units)
    encoded = encode_manifest(manifest)
    return StartInstance(
        instance_id="",
        function="gpu-check",
        version=1,
        task="generate",
        architecture=manifest.architecture,
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
    )


async def _starts(task: Task, folder: Path, request: StartInstance, content: np.ndarray) -> list[Row]:
    assert request.image is not None
    image = request.image
    tier = HostTier(folder / "tiers" / "gpu-check", image.nbytes)
    arena = make_arena(task.device, image.nbytes + ((64 << 20) if task.small else (8 << 30)))
    rows: list[Row] = []
    tokens: list[tuple[int, ...]] = []
    try:
        gear = _gear(arena, tier, content, folder)
        instances = Instances("gpu-check", gear, Counters(), published=lambda record: None)
        try:
            for number, kind in enumerate(["cold", *["hot", "warm"] * _ROUNDS]):
                if task.left_s < 5:
                    rows.append(row("start", {"kind": kind}, skipped="no time was left"))
                    break
                if kind == "warm":
                    gear.residents.drop(image.image)  # it comes from the host tier again
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
    began_s = time.perf_counter()
    instance = instances.start(request)
    await instance.settled()
    seconds = time.perf_counter() - began_s
    if instance.state is not InstanceState.READY:
        return row("start", params, ok=False, error=instance.life.error)
    tokens.append(await _generate(instance))
    found = row(
        "start",
        params,
        ok=instance.life.start_kind == kind,
        seconds=[seconds],
        phases_ms={phase: round(ms, 3) for phase, ms in instance.life.phases_ms.items()},
        first_call_s=time.perf_counter() - began_s - seconds,
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
    outputs = [output async for output in instance.runner.generate(sequence)]
    return tuple(output.token_id for output in outputs if output.token_id is not None)


def _gear(arena: Arena, tier: HostTier, content: np.ndarray, scratch: Path) -> Equipment:
    """A node's equipment; an image that the host tier lacks comes from `content`."""
    clock = SystemClock()
    residents = Residents(arena, _KEPT_S, clock, lambda: None)
    loader = ImageLoader(
        node="gpu-check",
        host="gpu-check",
        tier=tier,
        published=PublishedImages(NoServer(), tier, residents.buffer),
        store=None,
        connector=Connector("gpu-check", []),
        casting=None,
        in_arena=lambda image: content.data,
        counters=Counters(),
        changed=lambda: None,
    )
    return Equipment(
        arena=arena,
        residents=residents,
        loader=loader,
        engines=RealEngines(),
        make_handler=None,
        scratch_dir=scratch,
        clock=clock,
        meter=GpuMeter("gpu-check", 1, lambda: time.monotonic_ns() // 1000, clock.wall_s()),
        tell=lambda function, line: None,
    )
