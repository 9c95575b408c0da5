"""What `deploy` makes of a checkpoint before anything is uploaded."""

from pathlib import Path

import pytest
import transformers as hf

from cli.errors import DeployError
from cli.upload.bundle import bundle_model, handler_files
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


def test_names_with_a_dot_stay_at_home(tmp_path: Path) -> None:
    for name in ("handler.py", ".env", "pkg/code.py", "pkg/.secret", ".git/config", "__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [str(path.relative_to(tmp_path)) for path in handler_files(tmp_path)]
    assert found == ["handler.py", "pkg/code.py"]
