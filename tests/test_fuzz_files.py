"""Damaged checkpoints and manifests: each is refused with a clear error, or means what the good one means,
and costs no more memory than twice its file."""

import copy
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
from registry.images.plan import PackPlan
from registry.images.safetensors_file import SINGLE_FILE, read_header
from registry.images.verify import check_units
from tests.engine_fixture import MemoryRegion
from tests.images_fixture import frame, llama_config, llama_tensors, write_checkpoint

CASES = 200
SEED = 20
HIDDEN = 96
CONFIG = llama_config(
    hidden_size=HIDDEN,
    intermediate_size=2 * HIDDEN,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=400,
)
Mutation = Callable[[random.Random, Any], Any]

NUMBERS: tuple[Any, ...] = (
    -1,
    0,
    1,
    7,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    1 << 200,
    1.5,
    float("nan"),
    float("inf"),
    True,
    None,
    "8",
    [],
    {},
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    return write_checkpoint(folder, llama_tensors(hidden=HIDDEN, vocab=400), CONFIG)


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


# --- mutations of a safetensors header --------------------------------------------------------------


def entry_of(random_: random.Random, header: Any) -> Any:
    return header[random_.choice(sorted(header))]


def change_dtype(random_: random.Random, header: Any) -> None:
    entry_of(random_, header)["dtype"] = random_.choice(
        ["F16", "I32", "U8", "F8_E4M3", "F64", "F7", "", "f32", None, 4, ["F32"], "F" * 5000, "\ud800"]
    )


def change_shape(random_: random.Random, header: Any) -> None:
    entry = entry_of(random_, header)
    shape = entry["shape"]
    kind = random_.randrange(5)
    if kind == 0:
        shape[random_.randrange(len(shape))] = random_.choice(NUMBERS)
    elif kind == 1:
        shape.append(random_.choice(NUMBERS))
    elif kind == 2 and shape[0] % 2 == 0:
        entry["shape"] = [shape[0] // 2, 2, *shape[1:]]  # as many bytes
    elif kind == 3:
        entry["shape"] = [1 << 32] * 64
    else:
        entry["shape"] = random_.choice([None, "2", {}, 3, deep(100), [1] * 100_000])


def change_offsets(random_: random.Random, header: Any) -> None:
    entry = entry_of(random_, header)
    offsets = entry["data_offsets"]
    kind = random_.randrange(5)
    if kind == 0:
        offsets[random_.randrange(2)] = random_.choice(NUMBERS)
    elif kind == 1:
        offsets.reverse()
    elif kind == 2:
        entry["data_offsets"] = list(entry_of(random_, header)["data_offsets"])
    elif kind == 3:
        shift = random_.choice([-4, 4, 1 << 40])
        entry["data_offsets"] = [offset + shift for offset in offsets]
    else:
        entry["data_offsets"] = random_.choice([None, [], [0], [0, 4, 8], "0,4", {"begin": 0}])


def change_names(random_: random.Random, header: Any) -> None:
    name = random_.choice(sorted(header))
    kind = random_.randrange(4)
    if kind == 0:
        header[name + random_.choice(["x", "\0", "/../../etc", "\u202e"])] = header.pop(name)
    elif kind == 1:
        del header[name]
    elif kind == 2:
        header["extra.weight"] = copy.deepcopy(header[name])
    else:
        header[name] = random_.choice([None, [], "x", 1, {}, {**header[name], "more": 1}])


def change_metadata(random_: random.Random, header: Any) -> None:
    header["__metadata__"] = random_.choice(
        [{"format": "pt"}, {"x": "y" * 100_000}, deep(50), deep(900), 5, None, {"n": 1 << 300}]
    )


def encoded(mutate: Callable[[random.Random, Any], None]) -> Mutation:
    """A mutation of the header's JSON, with its length right."""

    def apply(random_: random.Random, raw: bytes) -> bytes:
        header, data = parted(raw)
        mutate(random_, header)
        return frame(header) + data

    return apply


def parted(raw: bytes) -> tuple[Any, bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def flip_bits(random_: random.Random, raw: bytes) -> bytes:
    """In the header or its length: data has no redundancy in this format."""
    changed = bytearray(raw)
    end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(random_.randint(1, 8)):
        changed[random_.randrange(end)] ^= 1 << random_.randrange(8)
    return bytes(changed)


def truncate(random_: random.Random, raw: bytes) -> bytes:
    return raw[: random_.choice([0, 7, 8, 9, random_.randrange(4000), random_.randrange(len(raw))])]


def extend(random_: random.Random, raw: bytes) -> bytes:
    return raw + bytes(random_.randint(1, 5000))


def change_length(random_: random.Random, raw: bytes) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    huge = [0, 1, length - 1, length + 1, len(raw), len(raw) - 8, 99_999_999, 1 << 40, (1 << 64) - 1]
    return random_.choice(huge).to_bytes(8, "little") + raw[8:]


def other_json(random_: random.Random, raw: bytes) -> bytes:
    """A header that is no object of tensors at all."""
    _, data = parted(raw)
    bombs = [
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"[" + b"0," * 200_000 + b"0]",
        b"[" + b"[]," * 200_000 + b"[]]",
        b"{" + b'"a":1,' * 100_000 + b'"a":1}',
        b"\xff\xfe{}",
        b'{"a": "\xc3\x28"}',
        b"NaN",
        b"9" * 100_000,
        b"{}",
        b"null",
        b'"' + b"x" * 100_000 + b'"',
        b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, Infinity]}}',
        b"\x80\x04\x95cposix\nsystem\n.",
    ]
    header = random_.choice(bombs)
    return len(header).to_bytes(8, "little") + header + data


CHECKPOINT_MUTATIONS: tuple[Mutation, ...] = (
    encoded(change_dtype),
    encoded(change_shape),
    encoded(change_offsets),
    encoded(change_names),
    encoded(change_metadata),
    flip_bits,
    truncate,
    extend,
    change_length,
    other_json,
)


def measured(work: Callable[[], Any]) -> tuple[Any, int]:
    """What the work returns and the most memory that it held."""
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
            # Whole, but not the model that config.json tells of: it never runs.
            with pytest.raises(EngineError):
                bound(manifest, plan)
            outcomes["does not start"] += 1
    assert outcomes["refused"] > CASES // 2, outcomes


def bound(manifest: Manifest, plan: PackPlan) -> object:
    """The engine's layers over the image."""
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


# --- mutations of a manifest ------------------------------------------------------------------------


def change_field(random_: random.Random, manifest: Any) -> None:
    name = random_.choice(sorted(manifest))
    kind = random_.randrange(4)
    if kind == 0:
        del manifest[name]
    elif kind == 1:
        manifest[name] = random_.choice(NUMBERS)
    elif kind == 2:
        manifest["extra"] = deep(random_.choice([3, 900]))
    else:
        manifest[name] = random_.choice(["", "x" * 10_000, "../../x", "ab" * 32, deep(100), [0] * 100])


def change_tensor(random_: random.Random, manifest: Any) -> None:
    tensor = random_.choice(manifest["tensors"])
    name = random_.choice(sorted(tensor))
    kind = random_.randrange(5)
    if kind == 0:
        tensor[name] = random_.choice(NUMBERS)
    elif kind == 1:
        del tensor[name]
    elif kind == 2:
        tensor["shape"] = random_.choice(
            [[-1, -1], [1 << 40] * 3, [1] * 65, [0], [*tensor["shape"][::-1], 1]]
        )
    elif kind == 3:
        tensor["offset"] += random_.choice([1, -256, 256, 1 << 50, -(1 << 50)])
    else:
        tensor["name"] = random_.choice(manifest["tensors"])["name"]


def change_span(random_: random.Random, manifest: Any) -> None:
    span = random_.choice(manifest["layers"])
    name = random_.choice(sorted(span))
    kind = random_.randrange(3)
    if kind == 0:
        span[name] = random_.choice(NUMBERS)
    elif kind == 1:
        manifest["layers"].remove(span)
    else:
        manifest["layers"].append(dict(span))


def change_units(random_: random.Random, manifest: Any) -> None:
    units = manifest["units"]
    place = random_.randrange(len(units))
    manifest["units"] = random_.choice(
        [
            units[:place],
            units + units,
            units[:place] + ("A" if units[place] != "A" else "B") + units[place + 1 :],
            "!" * len(units),
            "",
            "\u00e9",
        ]
    )


def claim(random_: random.Random, manifest: Any) -> None:
    """An image of another size than it is."""
    manifest["nbytes"] = random_.choice([0, 1, manifest["nbytes"] + 1, 1 << 45, 1 << 61, 1 << 62, 1 << 70])
    if random_.random() < 0.5:
        manifest["layers"][-1]["end"] = manifest["nbytes"]


def as_json(mutate: Callable[[random.Random, Any], None]) -> Mutation:
    def apply(random_: random.Random, raw: bytes) -> bytes:
        manifest = json.loads(raw)
        mutate(random_, manifest)
        return json.dumps(manifest).encode()

    return apply


def flip_any(random_: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(random_.randint(1, 4)):
        changed[random_.randrange(len(changed))] ^= 1 << random_.randrange(8)
    return bytes(changed)


def other_text(random_: random.Random, raw: bytes) -> bytes:
    return random_.choice(
        [
            b"",
            b"null",
            b"[]",
            b"[" * 100_000,
            b'{"tensors":' * 10_000,
            raw[:-1],
            raw + raw,
            b"\xef\xbb\xbf" + raw,
            raw.replace(b":", b":NaN", 1),
            raw.replace(b'"F32"', b'"\xff\xff"', 1),
            b'{"nbytes":' + b"9" * 50_000 + b"}",
        ]
    )


MANIFEST_MUTATIONS: tuple[Mutation, ...] = (
    as_json(change_field),
    as_json(change_tensor),
    as_json(change_span),
    as_json(change_units),
    as_json(claim),
    flip_any,
    truncate,
    other_text,
)


def test_damaged_manifests(good: Path) -> None:
    plan = plan_checkpoint(good)
    image = memoryview(b"".join(plan.chunks()))
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
