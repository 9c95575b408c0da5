"""Synthetic safetensors checkpoints, written without torch, for the tests of model images."""

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from registry.images.safetensors_file import INDEX_FILE, SINGLE_FILE

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode(tensors: Mapping[str, np.ndarray]) -> bytes:
    """A safetensors file."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return frame(header) + data


def frame(header: object) -> bytes:
    """A safetensors header alone."""
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw


def llama_config(layers: int = 2, **changes: object) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        **changes,
    }


def llama_tensors(
    layers: int = 2, hidden: int = 16, vocab: int = 40, dtype: str = "F32", seed: int = 0, head: bool = True
) -> dict[str, np.ndarray]:
    """Random tensors under Llama's names; the order in the file is not the order of execution."""
    random = np.random.default_rng(seed)

    def tensor(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])

    tensors = {"model.norm.weight": tensor(hidden)}
    if head:
        tensors["lm_head.weight"] = tensor(vocab, hidden)
    for i in reversed(range(layers)):
        base = f"model.layers.{i}"
        for name in ("up", "gate"):
            tensors[f"{base}.mlp.{name}_proj.weight"] = tensor(2 * hidden, hidden)
        tensors[f"{base}.mlp.down_proj.weight"] = tensor(hidden, 2 * hidden)
        for name in ("v", "o", "k", "q"):
            tensors[f"{base}.self_attn.{name}_proj.weight"] = tensor(hidden, hidden)
        for name in ("post_attention_layernorm", "input_layernorm"):
            tensors[f"{base}.{name}.weight"] = tensor(hidden)
    tensors["model.embed_tokens.weight"] = tensor(vocab, hidden)
    return tensors


def write_checkpoint(
    folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, object], shards: int = 1
) -> Path:
    """A checkpoint folder; with `shards` > 1 an index and that many files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        (folder / SINGLE_FILE).write_bytes(encode(tensors))
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        (folder / file).write_bytes(encode(part))
        weight_map.update(dict.fromkeys(part, file))
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
