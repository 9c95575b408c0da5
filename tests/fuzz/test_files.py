"""Damaged checkpoints and manifests: each is rejected with a clear error, or has the meaning of the good one.

None costs more memory than twice its file.
"""

import functools
import hashlib
import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from invoker.engine.contract import EngineError, ModelSpec
from invoker.engine.weights import bind
from registry.errors import CheckpointError, CorruptImage, ImageError
from registry.images.architectures import context_length_of, task_of
from registry.images.codec import decode_manifest, encode_manifest
from registry.images.manifest import Manifest
from registry.images.pack import hash_image, plan_checkpoint
from registry.images.plan import PackPlan, image_chunks
from registry.images.safetensors_file import SINGLE_FILE, read_header
from registry.images.verify import check_units
from tests.fixtures.damaged_files import (
    CASES,
    CHECKPOINT_MUTATIONS,
    CONFIG,
    HIDDEN,
    MANIFEST_MUTATIONS,
    NUMBERS,
    SEED,
    deep,
    flip_any,
    truncate,
)
from tests.fixtures.engine import MemoryRegion
from tests.fixtures.images import llama_tensors, write_checkpoint


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    return write_checkpoint(folder, llama_tensors(hidden=HIDDEN, vocab=400), CONFIG)


def measured(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of the work and its peak memory."""
    tracemalloc.start()
    try:
        result = work()
    except (ImageError, EngineError) as error:
        assert str(error), "an error without words"
        result = error
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return result, peak


def test_damaged_safetensors_files(good: Path, tmp_path: Path) -> None:
    raw = (good / SINGLE_FILE).read_bytes()
    wanted = plan_checkpoint(good)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    random_ = random.Random(SEED)
    outcomes: Counter[str] = Counter()
    for case in range(CASES):
        mutate = CHECKPOINT_MUTATIONS[case % len(CHECKPOINT_MUTATIONS)]
        file = tmp_path / SINGLE_FILE
        damaged = mutate(random_, raw)
        file.write_bytes(damaged)

        def pack() -> tuple[PackPlan, Manifest]:
            plan = plan_checkpoint(tmp_path)
            return plan, hash_image(plan)

        found, peak = measured(pack)
        small = 3 << 20 if len(damaged) < 1 << 20 else 0  # of a cut file, what its header may cost
        assert peak <= max(2 * len(damaged), small), (case, peak, len(damaged))
        if isinstance(found, Exception):
            assert isinstance(found, CheckpointError)
            outcomes["refused"] += 1
            continue
        plan, manifest = found
        if plan.layout == wanted.layout:
            outcomes["harmless"] += 1
        else:
            # Whole, but not the model that config.json describes: it never runs.
            with pytest.raises(EngineError):
                bound(manifest, plan)
            outcomes["does not start"] += 1
    assert outcomes["refused"] > CASES // 2, outcomes


def bound(manifest: Manifest, plan: PackPlan) -> object:
    """Return the engine's layers over the image."""
    region = MemoryRegion(manifest.nbytes)
    plan.read_into(0, region.buffer)
    spec = ModelSpec(manifest=manifest, config=CONFIG, dtype="float32", context_length=64)
    return bind(spec, region)


def test_a_header_that_claims_terabytes_costs_nothing(tmp_path: Path) -> None:
    file = tmp_path / SINGLE_FILE
    for length in (99_000_000, 1 << 40, (1 << 64) - 1):
        file.write_bytes(length.to_bytes(8, "little") + b"{}")
        found, peak = measured(functools.partial(read_header, file))
        assert isinstance(found, CheckpointError) and peak < 64 << 10


def test_a_header_may_not_be_most_of_a_large_file(tmp_path: Path) -> None:
    header = b"[" + b"[]," * 3_000_000 + b"[]]"
    file = tmp_path / SINGLE_FILE
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    found, peak = measured(functools.partial(read_header, file))
    assert isinstance(found, CheckpointError) and "header" in str(found) and peak < 64 << 10


def test_damaged_manifests(good: Path) -> None:
    plan = plan_checkpoint(good)
    image = memoryview(b"".join(image_chunks(plan)))
    wanted = hash_image(plan)
    raw = encode_manifest(wanted)
    digest = hashlib.sha256(image).hexdigest()
    random_ = random.Random(SEED)
    outcomes: Counter[str] = Counter()
    for case in range(CASES):
        damaged = MANIFEST_MUTATIONS[case % len(MANIFEST_MUTATIONS)](random_, raw)
        found, peak = measured(functools.partial(decode_manifest, damaged))
        assert peak <= 2 * max(len(damaged), len(raw)) + (64 << 10), (case, peak, len(damaged))
        if isinstance(found, Exception):
            assert isinstance(found, CorruptImage) and "manifest" in str(found)
            outcomes["refused"] += 1
        elif found.sha256 != digest or found.nbytes != len(image):
            outcomes["of another image"] += 1  # which a deploy compares
        elif check_units(found, 0, image):
            outcomes["fails at its load"] += 1
        elif (found.tensors, found.layers, found.tied_head) == (
            wanted.tensors,
            wanted.layers,
            wanted.tied_head,
        ):
            outcomes["harmless"] += 1
        else:
            with pytest.raises(EngineError):
                bound(found, plan)
            outcomes["does not start"] += 1
    assert outcomes["refused"] > CASES // 2, outcomes


# --- config.json --------------------------------------------------------------------------------------


def test_damaged_configurations(good: Path, tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).symlink_to(good / SINGLE_FILE)
    random_ = random.Random(SEED)
    text = json.dumps(CONFIG).encode()
    for _ in range(CASES):
        config = dict(CONFIG)
        name = random_.choice(sorted(config))
        config[name] = random_.choice([*NUMBERS, deep(50), "x" * 1000, [None]])
        damaged = random_.choice(
            [json.dumps(config).encode(), flip_any(random_, text), truncate(random_, text)]
        )
        (tmp_path / "config.json").write_bytes(damaged)

        def read() -> tuple[PackPlan, object, int]:
            plan = plan_checkpoint(tmp_path)
            return plan, task_of(plan.config), context_length_of(plan.config)

        found, _ = measured(read)
        assert isinstance(found, CheckpointError | tuple)
