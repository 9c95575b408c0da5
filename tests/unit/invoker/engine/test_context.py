"""The longest context of a model at deploy is that of the engine."""

import itertools
import logging

import pytest

from invoker.engine.contract import UnsupportedModel
from invoker.engine.decoder_models import decoder_config, longest_of
from registry.images.architectures import context_length_of

FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
ROPES: tuple[dict[str, object], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "factor": 4.0, **FACTORS},
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 1024, **FACTORS},
    {"type": "longrope", "original_max_position_embeddings": 1024, **FACTORS},
)
KINDS = (("LlamaForCausalLM", "llama"), ("Qwen2ForCausalLM", "qwen2"), ("Phi3ForCausalLM", "phi3"))


@pytest.mark.parametrize(("architecture", "model_type"), KINDS)
def test_the_gateway_and_the_engine_agree(architecture: str, model_type: str) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    compared = 0
    for rope, original, longest in itertools.product(ROPES, (None, 2048), (4096, 131_072)):
        config = {
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
            "vocab_size": 100,
            "max_position_embeddings": longest,
            "rope_scaling": rope,
        }
        if original is not None:
            config["original_max_position_embeddings"] = original
        try:
            engine_longest = longest_of(decoder_config(architecture, config))
        except UnsupportedModel:
            continue
        assert context_length_of(config) == engine_longest, (rope, original, longest)
        compared += 1
    assert compared >= 12


def test_a_stretched_context_ends_where_it_was_stretched_from() -> None:
    phi3 = {"architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 131_072}
    assert context_length_of(phi3) == 131_072
    for kind in ("longrope", "su", "yarn"):
        assert context_length_of({**phi3, "rope_scaling": {"type": kind}}) == 4096
    named = {**phi3, "rope_scaling": {"type": "su"}, "original_max_position_embeddings": 8192}
    assert context_length_of(named) == 8192
