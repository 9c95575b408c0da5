"""A random Llama checkpoint of a chosen size, for measuring starts."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 1024, 2816, 16, 16
LAYER_BYTES = 51_400_000
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}


def write_random_llama(out: Path, tokenizer: Path, layers: int = 5) -> None:
    """Write a float32 Llama of about 51 MB per layer to `out` unless it exists; copy the tokenizer."""
    if (out / "model.safetensors").is_file():
        return
    config = json.loads((tokenizer / "config.json").read_text())
    generator = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(0.02)

    tensors = {
        "model.embed_tokens.weight": weights(config["vocab_size"], HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, dtype=np.float32),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": weights(*shape) for name, shape in SHAPES.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = np.ones(HIDDEN, dtype=np.float32)
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, temporary / name)
    temporary.rename(out)
