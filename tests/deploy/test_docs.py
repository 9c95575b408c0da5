"""The documents say what the programs do: routes, commands, flags and links."""

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from benchmarks.tables import RESULTS, update
from cli.group import cli
from gateway.api import operations
from gateway.core.settings import parse as parse_gateway
from invoker.settings import parse_settings as parse_invoker

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = sorted(
    path
    for folder in ("gateway", "invoker", "registry", "rdmacast")
    for path in (ROOT / folder).rglob("*.md")
)
HTTP = (ROOT / "docs" / "HTTP.md").read_text()
OPERATIONS = (ROOT / "docs" / "OPERATIONS.md").read_text()

# Of the place where this was written. Put together here, so that this file does not name them itself.
ELSEWHERE = [b"../" + b"shared", b"/work" + b"/", b"/tmp" + b"/hc"]

_FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`(hypercast [^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")
_FLAG_LINE = re.compile(r"^ +(--[a-z-]+)", re.MULTILINE)


def blocks(text: str) -> list[str]:
    return [match[1] for match in _FENCE.finditer(text)]


def prose(text: str) -> str:
    return _FENCE.sub("", text)


def commands_in(block: str) -> Iterator[list[str]]:
    """Yield the words after `hypercast` of each command line of a code block."""
    lines = block.splitlines()
    for index, line in enumerate(lines):
        line = re.sub(r"^docker run .*? hypercast:\d\S* ", "hypercast ", line.removeprefix("$ "))
        if line.startswith("hypercast "):
            yield words(line, lines[index + 1 :])


def words(line: str, following: list[str]) -> list[str]:
    """Return a shell line's words up to a comment, pipe or list, with its continuation lines."""
    for more in [*following, ""]:
        with contextlib.suppress(ValueError):
            if not line.endswith("\\"):
                found = shlex.split(line, comments=True)
                ends = [found.index(end) for end in ("|", "&&", ";", "<", ">", "&") if end in found]
                return found[1 : min(ends, default=len(found))]
        line = f"{line[:-1]} {more}" if line.endswith("\\") else f"{line}\n{more}"
    raise AssertionError(f"the quotes of this command line do not end: {line}")


def every_command() -> list[tuple[str, list[str], bool]]:
    """(document, words, whether the command line is complete)."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        found += [(path.name, line, True) for block in blocks(text) for line in commands_in(block)]
        found += [(path.name, shlex.split(m[1])[1:], False) for m in _INLINE.finditer(prose(text))]
    return found


def flags_of(parse: Callable[[], object]) -> set[str]:
    """Return the flags that a program's --help lists."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        parse()
    return set(_FLAG_LINE.findall(out.getvalue())) | {"--help"}


PROCESSES = {
    "gateway": flags_of(lambda: parse_gateway(["--help"], {})),
    "invoker": flags_of(lambda: parse_invoker(["--help"], {})),
}


def check(arguments: list[str], *, complete: bool) -> None:
    """Raise click.UsageError, or AssertionError, if the program would not understand the line."""
    arguments = [argument for argument in arguments if argument != "--help"]
    if not arguments or arguments[0].isupper():  # `hypercast COMMAND --help`
        return
    if arguments[0] in PROCESSES:
        given = {a.partition("=")[0] for a in arguments if a.startswith("--")}
        assert given <= PROCESSES[arguments[0]]
        return
    command: click.Command = cli
    context = click.Context(cli, info_name="hypercast")
    while isinstance(command, click.Group):
        if not arguments:
            return
        name, *arguments = arguments
        found = command.get_command(context, name)
        assert found is not None, f"there is no command {name!r}"
        command = found
        context = click.Context(command, parent=context, info_name=name)
    try:
        command.make_context(context.info_name, arguments, parent=context.parent)
    except click.MissingParameter:
        if complete:
            raise


@pytest.mark.parametrize(("document", "line", "complete"), every_command())
def test_command_lines_are_understood(document: str, line: list[str], complete: bool) -> None:
    check(line, complete=complete)


def test_command_lines_are_found_and_wrong_ones_noticed() -> None:
    block = (
        "$ hypercast invoke f -p 'two\n  lines' -n 3 | cat   # why\noutput\nhypercast up \\\n  --nodes 2\n"
    )
    assert list(commands_in(block)) == [
        ["invoke", "f", "-p", "two\n  lines", "-n", "3"],
        ["up", "--nodes", "2"],
    ]
    for wrong in (["up", "--nodez", "2"], ["usage", "report", "--bad"], ["deploy"]):
        with pytest.raises(click.UsageError):
            check(wrong, complete=True)
    for wrong in (["fly"], ["gateway", "--bad"]):
        with pytest.raises(AssertionError):
            check(wrong, complete=True)


def test_every_route_is_described() -> None:
    routes = [f"{op.method.upper()} {op.path}" for op in operations.OPERATIONS if op.method != "head"]
    assert len(routes) > 20
    missing = [route for route in routes if f"`{route}`" not in HTTP]
    assert not missing


@pytest.mark.parametrize("program", ["up", "gateway", "invoker"])
def test_every_flag_is_described(program: str) -> None:
    if program == "up":
        command = cli.get_command(click.Context(cli), "up")
        assert command is not None
        flags = {
            flag
            for option in command.params
            if isinstance(option, click.Option) and not option.hidden
            for flag in option.opts
        }
    else:
        flags = PROCESSES[program] - {"--help"}
    assert len(flags) > 5
    assert not {flag for flag in flags if not re.search(rf"`{flag}[` ]", OPERATIONS)}


def slug(heading: str) -> str:
    """Return a heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose(path.read_text()), re.MULTILINE)}


@pytest.mark.parametrize("path", [*DOCUMENTS, *PACKAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in _LINK.findall(prose(path.read_text())):
        file = path.parent / target if target else path
        assert file.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{path.name} links to {target}#{anchor}"


@pytest.mark.parametrize("path", [*DOCUMENTS, *PACKAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_documents_exist(path: Path) -> None:
    text = prose(path.read_text())
    for named in re.findall(
        r"`((?:gateway|invoker|registry|rdmacast|cli|benchmarks|tests|docs)/[\w/.-]*)`", text
    ):
        assert "NAME" in named or (ROOT / named).exists(), f"{path.name} names {named}"


def test_packages_list_their_modules() -> None:
    missing = [
        f"{init.relative_to(ROOT)}: {module.stem}"
        for folder in ("gateway", "invoker", "registry", "rdmacast", "cli", "benchmarks")
        for init in (ROOT / folder).rglob("__init__.py")
        for module in init.parent.glob("*.py")
        if not module.stem.startswith("__") and f"`{module.stem}`" not in init.read_text()
    ]
    assert not missing


def test_no_file_names_the_place_where_it_was_written() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    files = [ROOT / name for name in listed.decode().split("\0") if name]
    found = [
        f"{path.relative_to(ROOT)}: {needle.decode()}"
        for path in files
        if path.is_file()
        for needle in ELSEWHERE
        if needle in path.read_bytes()
    ]
    assert not found


def test_every_marked_figure_is_the_one_in_its_result_file() -> None:
    changed, failed = update(DOCUMENTS, RESULTS, check=True)
    found = "\n".join(map(str, [*changed, *failed]))
    assert not found, f"run python -m benchmarks.tables, or mend the markers:\n{found}"
