"""`pip install` of the wheel into an empty environment, then a platform, a deploy and a call."""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.harness.processes import ROOT
from tests.fixtures.wheel import build_wheel

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1800)]

INSTALL_S = 1500.0
COMMAND_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment that has nothing but the wheel and what that requires, and where its user works."""

    bin: Path
    folder: Path

    def hypercast(self, *arguments: str, **variables: str) -> str:
        """Run the command; a failure shows what it printed. Returns its stdout."""
        ours = ("PYTHON", "HYPERCAST")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        done = subprocess.run(
            [str(self.bin / "hypercast"), *arguments],
            cwd=self.folder,
            env={**kept, "HOME": str(self.folder), **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"hypercast {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("installed")
    wheel = build_wheel(folder, isolated=True)
    venv.create(folder / "venv", with_pip=True)
    pip = [str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True, timeout=INSTALL_S)
    work = folder / "work"
    # Folders with the names of our packages, which must not be imported instead of them.
    for name in ("cli", "gateway", "invoker", "registry", "rdmacast", "functions"):
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text("raise RuntimeError('of the user')\n")
    yield Installed(bin=folder / "venv/bin", folder=work)


def test_its_requirements_are_met_and_nothing_of_this_tree_is_used(installed: Installed) -> None:
    python = str(installed.bin / "python")
    subprocess.run([python, "-m", "pip", "check"], check=True, timeout=COMMAND_S)
    where = subprocess.run(
        [python, "-P", "-c", "import cli, gateway, invoker; print(cli.__file__)"],
        cwd=installed.folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=COMMAND_S,
    )
    assert where.stdout.startswith(str(installed.bin.parent))
    assert sys.prefix != str(installed.bin.parent)


def test_an_example_answers_on_a_platform_of_the_wheel(installed: Installed) -> None:
    names = {one["name"] for one in json.loads(installed.hypercast("examples", "-o", "json"))}
    assert names == {"classify", "echo", "embed", "tiny-coder"}
    data = str(installed.folder / "data")
    up = ("up", "--nodes", "2", "--device", "cpu", "--port", "0", "--allow-handlers", "--detach")
    running = json.loads(installed.hypercast(*up, "--data-dir", data, "-o", "json"))
    try:
        key = Path(running["admin_key_file"]).read_text().strip()
        there = {"HYPERCAST_URL": running["url"], "HYPERCAST_API_KEY": key}
        installed.hypercast("deploy", "example:tiny-coder", **there)
        text = installed.hypercast("invoke", "tiny-coder", "-p", "import os\n", "-n", "8", "-t", "0", **there)
        assert text.strip()
        installed.hypercast("deploy", "example:echo", **there)
        echoed = installed.hypercast("invoke", "echo", "-d", '{"message": "hello"}', **there)
        assert json.loads(echoed) == {"message": "hello"}
    finally:
        installed.hypercast("down", "--data-dir", data)
