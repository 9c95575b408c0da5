"""The page of all commands, from their parsers."""

import re
from collections.abc import Iterator
from inspect import cleandoc

import click

from cli.group import COMMANDS, EPILOG, cli
from cli.reference.markdown import anchor, block, code, prose, table
from gateway.core.settings import COMMAND as GATEWAY
from invoker.settings import COMMAND as INVOKER

_PROCESSES = {"gateway": GATEWAY, "invoker": INVOKER}  # what `hypercast NAME` becomes
_NOTE = re.compile(r"\s*\[(default|env|env var): ([^\]]*)\]|\s*\[(required)\]")
_HEAD = """\
# Command line

Every command with its options, as `--help` shows them. What they do together is in [How
to](../docs/HOWTO.md).

"""


def command_line_page() -> str:
    """Return the page."""
    commands = list(every_command())
    overview = table(
        ("command", "does"),
        ((f"[{code(name)}](#{anchor('hypercast ' + name)})", prose(COMMANDS[name][1])) for name in COMMANDS),
    )
    return _HEAD + overview + _help(EPILOG) + "".join(_section(*one) for one in commands)


def every_command() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield the full name, such as `hypercast usage bill`, and the parser of each command."""
    root = click.Context(cli, info_name="hypercast")
    for name in cli.list_commands(root):
        command = _PROCESSES.get(name) or cli.get_command(root, name)
        assert command is not None
        yield from _with_parts(name, command, root)


def visible_options(command: click.Command) -> list[click.Option]:
    """Return the options that the help of a command lists."""
    return [one for one in command.params if isinstance(one, click.Option) and not one.hidden]


def _with_parts(
    name: str, command: click.Command, parent: click.Context
) -> Iterator[tuple[str, click.Command, click.Context]]:
    context = click.Context(command, info_name=name, parent=parent)
    yield context.command_path, command, context
    if isinstance(command, click.Group):
        for part in command.list_commands(context):
            found = command.get_command(context, part)
            assert found is not None
            yield from _with_parts(part, found, context)


def _section(path: str, command: click.Command, context: click.Context) -> str:
    level = "##" if path.count(" ") == 1 else "###"
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    return (
        f"{level} {path}\n\n"
        + block(usage, "text")
        + _help(command.help or "")
        + _help(command.epilog or "")
        + table(
            ("option", "default", "environment", "meaning"),
            (_row(one, context) for one in visible_options(command)),
        )
    )


def _row(option: click.Option, context: click.Context) -> tuple[str, str, str, str]:
    record = option.get_help_record(context)
    assert record is not None
    declared, text = record
    notes = {(kind or required): value for kind, value, required in _NOTE.findall(text)}
    default = "required" if "required" in notes else notes.get("default", "")
    environment = notes.get("env") or notes.get("env var") or ""
    return code(declared), prose(default), environment and code(environment), prose(_NOTE.sub("", text))


def _help(text: str) -> str:
    """Return a help text: paragraphs, and those that click leaves as they are, as code."""
    shown = []
    for paragraph in re.split(r"\n\s*\n", cleandoc(text)):
        if not paragraph.strip():
            continue
        if not paragraph.startswith("\b"):
            shown.append(prose(" ".join(paragraph.split())) + "\n\n")
            continue
        lines = paragraph.splitlines()[1:]
        if lines and re.fullmatch(r"[A-Z][a-z]+:", lines[0]):
            shown.append(f"{lines[0]}\n\n")
            lines = lines[1:]
        shown.append(block(cleandoc("\n" + "\n".join(lines)), "console"))
    return "".join(shown)
