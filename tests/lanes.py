"""A plugin of pytest: one of the two processes of `make test`.

One runs the files that start platforms, the other the rest, and then helps: of the files with platforms of
their own, which that process keeps for last, it takes one after the other from the end. What a file needs
shows in its text, so that no process imports much of what the other one runs.
"""

import ast
import functools
from collections.abc import Iterator
from enum import Enum, auto
from pathlib import Path

import pytest

# Names by which a test file has processes of a platform; the fixture of this name is shared by all tests.
_OF_PLATFORMS = {"Platform", "platform", "Zygote"}
_SHARED = "platform"
LANES = ("platforms", "others")


class Needs(Enum):
    NOTHING = auto()
    SHARED_PLATFORM = auto()
    OWN_PLATFORM = auto()


@functools.cache
def needs_of(file: Path) -> Needs:
    module = ast.parse(file.read_bytes())
    if _OF_PLATFORMS.isdisjoint(_bound(module)):
        return Needs.NOTHING
    arguments = {node.arg for node in ast.walk(module) if isinstance(node, ast.arg)}
    return Needs.SHARED_PLATFORM if _SHARED in arguments else Needs.OWN_PLATFORM


def _bound(module: ast.Module) -> Iterator[str]:
    for statement in module.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in statement.names)
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.name


class Lane:
    """What this process runs; a file in the folder `claims` says that one of the two has begun it."""

    def __init__(self, name: str, claims: Path) -> None:
        self._for_platforms = name == "platforms"
        self._claims = claims

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Files that were asked for by name are collected all the same."""
        return True if collection_path.suffix == ".py" and not self._may_run(collection_path) else None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        own = [item for item in items if needs_of(item.path) is Needs.OWN_PLATFORM]
        mine = [item for item in items if self._may_run(item.path) and item not in own]
        if not self._for_platforms:
            files = {item.path: None for item in own}
            own = [item for file in reversed(files) for item in own if item.path == file]
        items[:] = [*mine, *own]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leave out what the other one has begun."""
        mine = needs_of(item.path) is not Needs.OWN_PLATFORM or self._has(item.path)
        return None if mine else True

    @functools.cache  # noqa: B019 (there is one of it)
    def _has(self, file: Path) -> bool:
        try:
            (self._claims / file.name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _may_run(self, file: Path) -> bool:
        needs = needs_of(file)
        return needs is Needs.OWN_PLATFORM or (needs is Needs.SHARED_PLATFORM) == self._for_platforms


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=LANES, required=True)
    parser.addoption("--claims", type=Path, required=True, help="a folder that both processes share")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Lane(config.getoption("--lane"), config.getoption("--claims")))
