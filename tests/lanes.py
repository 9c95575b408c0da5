"""A plugin of pytest: one of the two processes of `make test`, which runs the files of its lane alone.

Which lane a file is of shows in its text, so that no process imports what the other one runs.
"""

import ast
import functools
from pathlib import Path

import pytest

# Names by which a test file has processes of a platform.
_OF_PLATFORMS = {"Platform", "platform", "Zygote"}
LANES = ("platforms", "others")


@functools.cache
def lane_of(file: Path) -> str:
    bound: set[str] = set()
    for statement in ast.parse(file.read_bytes()).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            bound.add(statement.name)
    return "others" if bound.isdisjoint(_OF_PLATFORMS) else "platforms"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=LANES, required=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that were asked for by name are collected all the same."""
    elsewhere = collection_path.suffix == ".py" and lane_of(collection_path) != config.getoption("--lane")
    return True if elsewhere else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if lane_of(item.path) == config.getoption("--lane")]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine
