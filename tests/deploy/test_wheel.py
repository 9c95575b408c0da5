"""What the wheel has; that it works in an empty environment is `make test-wheel`."""

import zipfile
from pathlib import Path

import pytest

from benchmarks.harness.processes import ROOT
from tests.fixtures.wheel import SOURCES, build_wheel

MAX_BYTES = 24 << 20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), isolated=False)


def test_the_wheel_has_every_module_and_what_they_read(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
    modules = {
        str(path.relative_to(ROOT))
        for name in SOURCES
        if name != "functions"
        for path in (ROOT / name).rglob("*.py")
    }
    console = {
        str(path.relative_to(ROOT))
        for folder in ("static", "vendor")
        for path in (ROOT / "gateway" / "ui" / folder).iterdir()
    }
    assert len(modules) > 500
    assert not modules - found - {"benchmarks/chaos/handler/handler.py"}  # a function: loaded by its path
    assert not console - found
    assert wheel.stat().st_size < MAX_BYTES


def test_the_wheel_has_the_examples_and_not_how_they_were_made(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if name.startswith("functions/")}
    models = {str(path.relative_to(ROOT)) for path in (ROOT / "functions/tiny-coder/model").iterdir()}
    declared = {str(path.relative_to(ROOT)) for path in ROOT.glob("functions/*/function.yaml")}
    assert len(declared) >= 4
    assert found == models | declared | {"functions/echo/handler.py"}
