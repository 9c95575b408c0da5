"""`context`: the gateways that the user has logged in to."""

import os
from typing import Any

import click

from cli.commands.login import warn_of_environment
from cli.completion import context_names
from cli.contexts import config_path, delete_context, read_config, use_context
from cli.errors import MissingError
from cli.options import output_option
from cli.output import emit_record, emit_rows
from cli.progress import note
from cli.tables import Column

FIELDS = ("name", "current", "url", "has_key", "ca_file")
COLUMNS = (
    Column(field="name"),
    Column(field="current", shown=lambda row: "yes" if row["current"] else ""),
    Column(field="url", heading="URL", shrink=20),
    Column(field="has_key", heading="KEY", shown=lambda row: "kept" if row["has_key"] else "none"),
    Column(field="ca_file", heading="CA", wide=True),
)


@click.group("context")
def context_command() -> None:
    """Choose between the gateways of `hypercast login`.

    The current context gives the address and the key where neither flags nor the environment do; `--context`
    and HYPERCAST_CONTEXT choose another for one command. No command shows a key.

    \b
    Examples:
      hypercast context list
      hypercast context use prod
      hypercast nodes --context staging
    """


@context_command.command("list")
@output_option
def list_contexts(form: str) -> None:
    """List the contexts.

    \b
    Examples:
      hypercast context list
      hypercast context list -o json
    """
    config = read_config(config_path(os.environ))
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "current": name == config.current,
            "url": context.url,
            "has_key": bool(context.api_key),
            "ca_file": context.ca_file,
        }
        for name, context in sorted(config.contexts.items())
    ]
    emit_rows(rows, COLUMNS, FIELDS, form)


@context_command.command("use")
@click.argument("name", shell_complete=context_names)
@output_option
def use(name: str, form: str) -> None:
    """Make a context the current one.

    \b
    Examples:
      hypercast context use prod
    """
    found = checked(name)
    use_context(config_path(os.environ), name)
    if form in ("json", "csv"):
        emit_record({"name": name, "url": found}, form)
    note(f"{name}: {found}")
    warn_of_environment()


@context_command.command("delete")
@click.argument("name", shell_complete=context_names)
@output_option
def delete(name: str, form: str) -> None:
    """Delete a context with its key from this machine. The key stays valid: `hypercast keys revoke`.

    \b
    Examples:
      hypercast context delete staging
    """
    found = checked(name)
    delete_context(config_path(os.environ), name)
    if form in ("json", "csv"):
        emit_record({"name": name, "url": found}, form)
    note(f"deleted {name}")


def checked(name: str) -> str:
    """Return the address of a context. Raises MissingError."""
    contexts = read_config(config_path(os.environ)).contexts
    if name not in contexts:
        known = ", ".join(sorted(contexts)) or "none"
        raise MissingError(f"there is no context {name!r}; contexts: {known}")
    return contexts[name].url
