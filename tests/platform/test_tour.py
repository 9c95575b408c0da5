"""The tour: each of its commands runs, in order, and prints what the page shows."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.harness.local_platform import free_port
from tests.fixtures.patience import until_seen
from tests.fixtures.platform import ROOT

TOUR = ROOT / "docs" / "TOUR.md"
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^```(\w*)$", re.MULTILINE)
_STEP = re.compile(r"((?:[^\n]*\\\n)*[^\n]*)\n(.*)", re.DOTALL)
_DONE = "--- done"
# Commands that only show something: they are repeated until they show it.
_SHOWS = ("hypercast status", "hypercast casts", "hypercast usage")
_OURS = ("HYPERCAST_", "XDG_CONFIG_", "XDG_DATA_")


class Step(NamedTuple):
    """A command of the page, and what the page shows below it."""

    command: str
    shown: str


def steps(page: str) -> list[Step]:
    """Return the commands of all console blocks."""
    found = []
    for block in _CONSOLE.findall(page):
        assert block.startswith("$ ")
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            step = _STEP.fullmatch(part)
            assert step is not None
            found.append(Step(step[1], step[2].rstrip()))
    return found


def pattern(shown: str) -> re.Pattern[str]:
    """Return what an output has to match.

    A line with nothing but … stands for any lines, … in a line for any text, and spaces for any number of
    them where there are several.
    """
    lines = []
    for line in shown.splitlines():
        if line == "…":
            lines.append(r"(?:.*\n)*?")
            continue
        words = [re.escape(part).replace("…", ".*") for part in re.split(r"(?: {2,})", line.strip())]
        lines.append(r" *" + r" +".join(words) + r" *\n")
    return re.compile("".join(lines))


def matches(shown: str, printed: str) -> bool:
    return pattern(shown).fullmatch(f"{printed.rstrip()}\n" if printed.strip() else "") is not None


class Shell:
    """A bash in which the commands run one after another, with what they print as on a terminal."""

    def __init__(self, folder: Path) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=ROOT,
            env={**environ, "HOME": str(folder), "COLUMNS": "120"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *_: Any) -> None:
        self._bash.communicate()

    def run(self, command: str) -> tuple[str, int]:
        """Return what a command printed, and its exit status."""
        assert self._bash.stdin is not None and self._bash.stdout is not None
        self._bash.stdin.write(f"{{ {command}\n}} </dev/null; echo $'\\n{_DONE}' $?\n")
        self._bash.stdin.flush()
        printed = []
        for line in self._bash.stdout:
            if line.startswith(_DONE):
                return "".join(printed).removesuffix("\n"), int(line.split()[-1])
            printed.append(line)
        raise AssertionError(f"the shell ended with: {command}\n{''.join(printed)}")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with Shell(tmp_path) as shell:
        yield shell
        shell.run("hypercast down --data-dir ./data")  # after a failure; else nothing runs any more


def test_every_command_of_the_tour_prints_what_the_page_shows(shell: Shell, tmp_path: Path) -> None:
    port = free_port()
    page = TOUR.read_text().replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    page = page.replace("hypercast up ", f"hypercast up --port {port} ")
    assert set(_FENCE.findall(page)) == {"console", ""}  # so that no command is in a block of another kind
    found = steps(page)
    assert len(found) > 20
    for command, shown in found:
        printed, status = shell.run(command)

        def again(command: str = command, shown: str = shown) -> bool:
            return matches(shown, shell.run(command)[0])

        if command.startswith(_SHOWS) and not matches(shown, printed):
            until_seen(f"`{command}` shows\n{shown}\ninstead of\n{printed}", again)
        else:
            assert matches(shown, printed), f"$ {command}\n{printed}\nis not what the page shows:\n{shown}"
        assert status == 0, f"$ {command}\n{printed}"
        if "activate" in command:  # what comes now may run anywhere, and leaves a folder behind
            shell.run(f"cd '{tmp_path}'")
    assert found[-1].command.startswith("hypercast down")


def test_outputs_are_compared_line_by_line() -> None:
    assert matches("a  …  c\n…\nlast", "a   b b  c\nx\ny\nlast\n") and matches("…\nlast", "last")
    assert not matches("a\nc", "a\nb\nc") and not matches("", "something") and matches("", "\n")
    assert not matches("…\nlast", "last\nmore") and not matches("2 of 2…", "1 of 2, failed")
    page = "x\n```console\n$ one \\\n  1\nout\n$ two\n```\n"
    assert steps(page) == [Step("one \\\n  1", "out"), Step("two", "")]
