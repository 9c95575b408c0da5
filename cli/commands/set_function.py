"""`set`: settings of a function, changed without a new version."""

from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from cli.client import Client, segment
from cli.completion import function_names
from cli.errors import UsageError
from cli.options import client_options, output_option
from cli.output import emit_record
from cli.progress import note
from cli.values import duration
from registry.config.function_yaml import parse_scaling, scaling_keys
from registry.config.handler_spec import key_of
from registry.errors import InvalidRecord

ALL_NODES = "all"
_MAX = "max_instances"


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    if "=" in incomplete:
        return []
    return [CompletionItem(f"{shown(key)}=") for key in scaling_keys() if shown(key).startswith(incomplete)]


@click.command("set")
@click.argument("name", shell_complete=function_names)
@click.argument("settings", metavar="SETTING=VALUE...", nargs=-1, required=True, shell_complete=_complete)
@output_option
@client_options
def set_command(name: str, settings: tuple[str, ...], form: str, client: Client) -> None:
    """Change settings of a function, without a new version. Others stay, and calls go on.

    The settings are those of `scaling` in function.yaml, with dashes: min-instances, max-instances ("all":
    one per node), target-concurrency, keep-alive, host-keep-alive, host-copies, live, policy,
    scale-down, scale-down-delay, ttft-target, tbt-target, serving.

    \b
    Examples:
      hypercast set tiny-coder keep-alive=5m
      hypercast set tiny-coder min-instances=1 max-instances=all
      hypercast set tiny-coder policy=load ttft-target=500ms
    """
    changes = parsed(settings)
    path = f"/admin/functions/{segment(name)}"
    before = client.json("GET", path)["scaling"]
    after = client.json("PATCH", path, json={"scaling": changes})["scaling"]
    if form in ("json", "csv"):
        emit_record({"name": name, "scaling": after}, form)
    note("\n".join(changed(name, changes, before, after)))


def parsed(settings: Sequence[str]) -> dict[str, Any]:
    """Return settings of the command line as fields of the API. Raises UsageError."""
    given: dict[str, str] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        key = key.replace("-", "_")
        if not equals or not value.strip():
            raise UsageError(f"{text!r} is not SETTING=VALUE, such as keep-alive=5m")
        if key not in scaling_keys():
            known = ", ".join(map(shown, scaling_keys()))
            raise UsageError(f"there is no setting {shown(key)!r}; settings: {known}")
        if key in given:
            raise UsageError(f"{shown(key)} is given twice")
        given[key] = value
    unbounded = {_MAX: None} if given.get(_MAX) == ALL_NODES else {}
    try:
        return parse_scaling({key: text for key, text in given.items() if key not in unbounded}) | unbounded
    except InvalidRecord as error:
        raise UsageError(str(error)) from error


def changed(
    name: str, changes: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
    """Return a line for each setting, with what it was."""
    lines = []
    for field in changes:
        was, now = _value(field, before[field]), _value(field, after[field])
        lines.append(f"{name}: {shown(key_of(field))} {now}" + (f" (was {was})" if was != now else ""))
    return lines


def shown(key: str) -> str:
    """Return a key of function.yaml as the command line has it."""
    return key.replace("_", "-")


def _value(field: str, value: object) -> str:
    if field == _MAX and value is None:
        return ALL_NODES
    return duration(float(str(value))) if field.endswith("_s") else str(value)
