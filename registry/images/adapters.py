"""LoRA adapters of a function: small files beside its model, `lora/NAME/…`, called as `FUNCTION/NAME`."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from registry.errors import InvalidRecord
from registry.images.assets import MAX_ASSET_BYTES
from registry.images.safetensors_file import read_bounded

FOLDER = "lora"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_ADAPTERS = 32
MAX_FILES_BYTES = 60 << 20  # of all files of a function, which a start sends to its node in one message
MAX_RANK = 512

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def adapters_of(files: Collection[str]) -> list[str]:
    """Return the names of the adapters among a function's files, sorted."""
    parts = [file.split("/") for file in files]
    return sorted(part[1] for part in parts if len(part) == 3 and (part[0], part[2]) == (FOLDER, CONFIG))


def config_of(adapter: str) -> str:
    """Return the name of an adapter's adapter_config.json among a function's files."""
    return f"{FOLDER}/{adapter}/{CONFIG}"


def model_of(function: str, adapter: str) -> str:
    """Return what a request's `model` names; `adapter` is "" for none."""
    return f"{function}/{adapter}" if adapter else function


def split_adapter(model: str) -> tuple[str, str]:
    """Return what names the function, and the adapter ("" for none), of a request's `model`."""
    function, _, adapter = model.partition("/")
    return function, adapter


def rank_of(config: bytes) -> int:
    """Return the rank of an adapter by its adapter_config.json. Raises InvalidRecord."""
    try:
        decoded = json.loads(config)
    except ValueError as error:
        raise InvalidRecord(f"{CONFIG}: not JSON: {error}") from None
    rank = decoded.get("r") if isinstance(decoded, dict) else None
    if type(rank) is not int or not 0 < rank <= MAX_RANK:
        raise InvalidRecord(f"{CONFIG}: r must be a whole number from 1 to {MAX_RANK}, not {rank!r}")
    return rank


def check_adapters(files: Collection[str]) -> None:
    """Raise InvalidRecord if the adapters among the names of a function's files are not whole."""
    names = adapters_of(files)
    if len(names) > MAX_ADAPTERS:
        raise InvalidRecord(f"at most {MAX_ADAPTERS} LoRA adapters are allowed")
    for name in names:
        if not _NAME.fullmatch(name):
            raise InvalidRecord(
                f"{name[:80]!r} is not a name for an adapter: use letters, digits, '.', '_', '-'"
            )
        if f"{FOLDER}/{name}/{WEIGHTS}" not in files:
            raise InvalidRecord(f"the adapter {name} has no {WEIGHTS}")


def read_adapters(folders: Mapping[str, Path]) -> dict[str, bytes]:
    """Return the files of adapters for a function, from the folder of each.

    Raises InvalidRecord, CheckpointError.
    """
    files: dict[str, bytes] = {}
    for name, folder in folders.items():
        for file in (CONFIG, WEIGHTS):
            path = folder / file
            if not path.is_file():
                raise InvalidRecord(f"the adapter {name}: {folder} has no {file}")
            files[f"{FOLDER}/{name}/{file}"] = read_bounded(path, MAX_ASSET_BYTES)
        rank_of(files[f"{FOLDER}/{name}/{CONFIG}"])
    check_adapters(files)
    return files
