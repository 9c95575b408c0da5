"""The command lines of processes, made from the flags of Options."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import click

from registry.config.option_types import Flag, PlatformCommand
from registry.config.options import FLAGS, Options, decode_options
from registry.errors import InvalidRecord

JSON_FLAG = "--options"

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULTS = {one.name: one.default for one in fields(Options)}


def options_of(command: PlatformCommand) -> Callable[[F], F]:
    """Add the flags of a command to a click function, which receives them as `options`."""
    names = [name for name, flag in FLAGS.items() if command in flag.commands]

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def filled(**values: Any) -> Any:
            options = Options(**{name: values.pop(name) for name in names})
            return function(options=options, **values)

        decorated: Any = filled
        for name in reversed(names):
            decorated = _click_option(name, FLAGS[name], command)(decorated)
        return decorated

    return decorate


def process_command(command: PlatformCommand, help: str) -> click.Command:
    """Return the click command of a process, for `parse_options`."""

    @click.command(
        f"hypercast {command}", help=help, context_settings={"help_option_names": ["-h", "--help"]}
    )
    @options_of(command)
    def parsed(options: Options) -> Options:
        return options

    return parsed


def parse_options(command: click.Command, argv: Sequence[str]) -> Options:
    """Return the options in `argv`, flags or one JSON argument. Raises InvalidRecord; `--help` exits."""
    if len(argv) == 2 and argv[0] == JSON_FLAG:
        return decode_options(argv[1])
    try:
        parsed = command.main(args=list(argv), prog_name=command.name, standalone_mode=False)
    except click.ClickException as error:
        raise InvalidRecord(f"{error.format_message()} (see --help)") from error
    if not isinstance(parsed, Options):
        raise SystemExit(0)  # it printed its help
    return parsed


def _click_option(name: str, flag: Flag, command: PlatformCommand) -> Callable[[F], F]:
    default = flag.defaults.get(command, _DEFAULTS[name])
    required = command in flag.required
    known = default not in (None, "") and not isinstance(default, bool) and not callable(default)
    shown = str(default) if known and (command in flag.defaults or not flag.shown) else flag.shown
    help = flag.helps.get(command, flag.help)
    if shown and not required and "[default:" not in help and not (command in flag.helps and default is None):
        help = f"{help}  [default: {shown}]"
    if isinstance(default, bool):
        return click.option(flag.name, name, is_flag=True, default=default, help=help)
    return click.option(
        flag.name,
        name,
        type=flag.type,
        required=required,
        metavar=flag.metavar,
        help=help,
        **({} if default is None else {"default": default}),  # None would satisfy `required`
    )
