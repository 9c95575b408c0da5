"""The small files of a model: configuration, tokenizer, preprocessing."""

from pathlib import Path

from registry.errors import CheckpointError
from registry.images.safetensors_file import read_bounded

MAX_ASSET_BYTES = 64 * 1024 * 1024
ASSET_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)


def collect_assets(path: str | Path) -> dict[str, bytes]:
    """Return the assets of a checkpoint folder by relative name, sorted. Raises CheckpointError."""
    folder = Path(path) if isinstance(path, str) else path
    assets: dict[str, bytes] = {}
    for pattern in ASSET_PATTERNS:
        for file in folder.glob(pattern):
            if file.is_file():
                assets[file.relative_to(folder).as_posix()] = read_bounded(file, MAX_ASSET_BYTES)
    if "config.json" not in assets:
        raise CheckpointError(f"{folder} has no config.json")
    return dict(sorted(assets.items()))
