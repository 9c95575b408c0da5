"""`gateway` and `invoker`: one process each, in place of this one."""

import os
import sys

import click

from cli.interpreter import module_command

PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def become(module: str, arguments: list[str]) -> None:
    """Replace this process, so that signals and exit codes are those of the program."""
    os.execv(sys.executable, [*module_command(module), *arguments])


@click.command("gateway", context_settings=PASS_THROUGH, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def gateway_command(arguments: tuple[str, ...]) -> None:
    """Run one gateway process (see `hypercast gateway --help`)."""
    become("gateway", list(arguments))


@click.command("invoker", context_settings=PASS_THROUGH, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def invoker_command(arguments: tuple[str, ...]) -> None:
    """Run one node (invoker) process (see `hypercast invoker --help`)."""
    become("invoker", list(arguments))
