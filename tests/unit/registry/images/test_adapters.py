"""LoRA adapters among a function's files: names, ranks, and what is refused."""

import json
import re
from pathlib import Path

import pytest

from registry.errors import InvalidRecord
from registry.images.adapters import (
    CONFIG,
    MAX_ADAPTERS,
    MAX_RANK,
    WEIGHTS,
    adapters_of,
    check_adapters,
    model_of,
    rank_of,
    read_adapters,
    split_adapter,
)


def write_adapter(folder: Path, rank: object = 8) -> Path:
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    (folder / WEIGHTS).write_bytes(b"weights of " + folder.name.encode())
    return folder


def test_adapters_are_read_from_their_folders(tmp_path: Path) -> None:
    files = read_adapters({name: write_adapter(tmp_path / name) for name in ("sql", "chat")})
    assert files[f"lora/sql/{WEIGHTS}"] == b"weights of sql"
    assert adapters_of({**files, "config.json": b"", "lora/notes.txt": b""}) == ["chat", "sql"]
    check_adapters(files)


def test_a_model_names_a_function_and_an_adapter() -> None:
    for function, adapter in (("coder", ""), ("coder", "sql"), ("coder:2", "sql")):
        assert split_adapter(model_of(function, adapter)) == (function, adapter)


@pytest.mark.parametrize("rank", [0, -1, MAX_RANK + 1, 1.5, True, "8", None])
def test_a_rank_is_a_whole_number_within_bounds(rank: object) -> None:
    with pytest.raises(InvalidRecord, match="r must be a whole number"):
        rank_of(json.dumps({"r": rank}).encode())


def test_broken_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRecord, match="not JSON"):
        rank_of(b"\xff{")
    with pytest.raises(InvalidRecord, match=f"the adapter sql: .* has no {re.escape(CONFIG)}"):
        read_adapters({"sql": tmp_path})
    folder = write_adapter(tmp_path / "sql")
    (folder / WEIGHTS).unlink()
    with pytest.raises(InvalidRecord, match=f"has no {re.escape(WEIGHTS)}"):
        read_adapters({"sql": folder})


def test_names_and_counts_of_adapters_are_checked() -> None:
    def files(*names: str) -> list[str]:
        return [f"lora/{name}/{file}" for name in names for file in (CONFIG, WEIGHTS)]

    check_adapters(files(*map(str, range(MAX_ADAPTERS))))
    with pytest.raises(InvalidRecord, match=f"at most {MAX_ADAPTERS}"):
        check_adapters(files(*map(str, range(MAX_ADAPTERS + 1))))
    for name in ("..", "", "a b", "x" * 64, "a\n"):
        with pytest.raises(InvalidRecord, match="is not a name for an adapter"):
            check_adapters(files(name))
    with pytest.raises(InvalidRecord, match="the adapter sql has no"):
        check_adapters([f"lora/sql/{CONFIG}"])
