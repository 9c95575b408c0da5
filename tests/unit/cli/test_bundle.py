"""What `deploy` makes of a checkpoint before anything is uploaded."""

from pathlib import Path

import pytest
import transformers as hf

from cli.errors import DeployError
from cli.upload.bundle import bundle_model
from registry.records.function import FunctionTask

TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def test_a_classifier_is_an_encoder_only_where_the_task_is_given(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    hf.BertForSequenceClassification(hf.BertConfig(**TINY)).save_pretrained(folder)
    with pytest.raises(DeployError, match=r"^BertForSequenceClassification is not supported.* --task embed$"):
        bundle_model(folder, "auto", "", None)
    assert bundle_model(folder, "auto", "", FunctionTask.EMBED).task is FunctionTask.EMBED


def test_a_masked_language_model_is_an_encoder(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    hf.BertForMaskedLM(hf.BertConfig(**TINY)).save_pretrained(folder)
    assert bundle_model(folder, "auto", "", None).task is FunctionTask.EMBED
    with pytest.raises(DeployError, match="BertModel has the task embed, not the task generate"):
        bundle_model(folder, "auto", "", FunctionTask.GENERATE)
