"""The safetensors reader: what it accepts, and that anything else is a clear CheckpointError."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry.errors import CheckpointError
from registry.images.safetensors_file import INDEX_FILE, read_checkpoint, read_header
from tests.fixtures.images import encode, frame, llama_config, llama_tensors, write_checkpoint

GOOD = encode({"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.arange(4, dtype="<i8")})


def test_header_gives_each_tensors_place(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(GOOD)
    tensors = read_checkpoint(tmp_path)
    assert {name: (t.dtype, t.shape, t.nbytes) for name, t in tensors.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("I64", (4,), 32),
    }
    raw = file.read_bytes()
    b = tensors["b"]
    assert np.frombuffer(raw[b.offset : b.offset + b.nbytes], dtype="<i8").tolist() == [0, 1, 2, 3]


def test_metadata_scalars_and_empty_tensors_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    header = {
        "__metadata__": {"format": "pt"},
        "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    }
    file.write_bytes(frame(header) + b"\0" * 4)
    assert sorted(read_header(file)) == ["empty", "scalar"]


def entry(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"\0" * 7, "too short"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        ((1000).to_bytes(8, "little") + b"{}", "truncated"),
        (frame(entry()) + b"\0" * 7, "truncated: tensor 'x'"),
        (frame(entry()) + b"\0" * 9, "1 bytes behind"),
        (frame([1, 2]), "must be a JSON object"),
        ((2).to_bytes(8, "little") + b"{x", "corrupt"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "corrupt"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "corrupt"),
        (frame(entry(dtype="F7")) + b"\0" * 8, "unknown dtype 'F7'"),
        (frame(entry(dtype=["F32"])) + b"\0" * 8, "unknown dtype"),
        (frame(entry(shape=[-2])) + b"\0" * 8, "shape"),
        (frame(entry(shape=[True, 2])) + b"\0" * 8, "shape"),
        (frame(entry(shape="2")) + b"\0" * 8, "shape"),
        (frame(entry(shape=[3])) + b"\0" * 8, "needs 12 bytes"),
        (frame(entry(shape=[1 << 62] * 60)) + b"\0" * 8, "needs"),
        (frame(entry(data_offsets=[8, 0])) + b"\0" * 8, "data_offsets"),
        (frame(entry(data_offsets=[0])) + b"\0" * 8, "data_offsets"),
        (frame(entry(extra=1)) + b"\0" * 8, "only those"),
        (frame({"x": 5}), "the entry must have"),
        (frame({**entry(), "y": entry()["x"]}) + b"\0" * 8, "overlaps"),
        (frame(entry(data_offsets=[4, 12])) + b"\0" * 12, "leaves a hole"),
        ((18).to_bytes(8, "little") + b'{"x": {}, "x": {}}', "'x' appears twice"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file)
    assert "model.safetensors" in str(caught.value)


@settings(max_examples=300)
@given(data=st.data())
def test_a_mutated_file_is_read_or_refused_but_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        match data.draw(st.sampled_from(("set", "cut", "insert"))):
            case "set" if content:
                content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
            case "cut":
                del content[data.draw(st.integers(0, len(content))) :]
            case _:
                at = data.draw(st.integers(0, len(content)))
                content[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    file = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    file.write_bytes(content)
    try:
        tensors = read_header(file)
    except CheckpointError:
        return
    assert all(t.offset + t.nbytes <= len(content) for t in tensors.values())


def test_sharded_equals_single(tmp_path: Path) -> None:
    tensors = llama_tensors()
    single = read_checkpoint(write_checkpoint(tmp_path / "single", tensors, llama_config()))
    sharded = read_checkpoint(write_checkpoint(tmp_path / "sharded", tensors, llama_config(), shards=3))
    assert single.keys() == sharded.keys()
    assert all((single[n].dtype, single[n].shape) == (sharded[n].dtype, sharded[n].shape) for n in single)


def edit_index(folder: Path, name: str, shard: object) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"][name] = shard
    (folder / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "a/b.safetensors",
        "..\\x.safetensors",
        "x.bin",
        "\0.safetensors",
    ],
)
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    folder = write_checkpoint(tmp_path, llama_tensors(), llama_config(), shards=2)
    edit_index(folder, "model.norm.weight", shard)
    with pytest.raises(CheckpointError, match="outside the checkpoint or of another kind"):
        read_checkpoint(folder)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, llama_tensors(), llama_config(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"1 of 3 shards are missing: model-00002-of-00003\.safetensors"
    ):
        read_checkpoint(folder)


def test_an_index_and_its_shards_must_agree(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, llama_tensors(), llama_config(), shards=2)
    good = (folder / INDEX_FILE).read_text()
    edit_index(folder, "model.extra.weight", "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.extra\.weight' is not in"):
        read_checkpoint(folder)
    index = json.loads(good)
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' .* is not in"):
        read_checkpoint(folder)
    (folder / INDEX_FILE).write_text('{"weight_map": {"a": 5}}')
    with pytest.raises(CheckpointError, match="weight_map"):
        read_checkpoint(folder)


def test_the_same_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    one = {"a": np.zeros(2, dtype="<f4")}
    (tmp_path / "one.safetensors").write_bytes(encode(one))
    (tmp_path / "two.safetensors").write_bytes(encode({**one, "b": np.zeros(1, dtype="<f4")}))
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"'a' is in one\.safetensors and in two\.safetensors"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "last.ckpt", "pytorch_model-00001-of-00002.bin"]
)
def test_pickles_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match=f"{name}.*save_pretrained"):
        read_checkpoint(tmp_path)


def test_folders_without_one_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no safetensors file"):
        read_checkpoint(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(GOOD)
    with pytest.raises(CheckpointError, match="2 safetensors files"):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot read .*none"):
        read_checkpoint(tmp_path / "none")
