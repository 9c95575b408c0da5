"""`list`, `describe`, `rollback` and `delete`."""

import sys
from typing import Any

import click

from cli.client import segment
from cli.errors import UsageError
from cli.options import client_options, connect, output_option
from cli.output import emit_record, emit_rows
from cli.progress import note

PIPELINE_COLUMNS = ("pipeline", "stages", "head", "rate", "switched")
LIST_COLUMNS = (
    "name",
    "version",
    "task",
    "architecture",
    "dtype",
    "bytes",
    "ready",
    "starting",
    "min",
    "max",
)


def summary(function: dict[str, Any]) -> dict[str, Any]:
    """One function as `list` shows it."""
    current = function["current"]
    scaling = function["scaling"]
    states = [instance["state"] for instance in function["instances"]]
    return {
        "name": function["name"],
        "version": current["version"],
        "task": current["task"],
        "architecture": current["architecture"],
        "dtype": current["dtype"],
        "bytes": current["image_bytes"],
        "image": current["image"],
        "ready": states.count("ready"),
        "starting": states.count("starting") + states.count("loading"),
        "min": scaling["min_instances"],
        "max": "all" if scaling["max_instances"] is None else scaling["max_instances"],
    }


def pipeline(one: dict[str, Any]) -> dict[str, Any]:
    """One pipeline of loading nodes as `describe` shows it."""
    stages = [f"{stage['node']}[{stage['first']},{stage['last']})" for stage in one["stages"]]
    return {
        "pipeline": f"{one['pipeline_id']}.{one['epoch']}",
        "stages": " ".join(stages),
        "head": one["stages"][one["head"]]["node"],
        "rate": round(one["rate"], 2),
        "switched": len(one["switched"]),
    }


@click.command("list")
@output_option
@client_options
def list_command(form: str, url: str | None, api_key: str | None) -> None:
    """List functions.

    Example: hypercast list -o json
    """
    with connect(url, api_key) as client:
        functions = client.json("GET", "/admin/functions")["functions"]
    emit_rows([summary(function) for function in functions], LIST_COLUMNS, form)


@click.command("describe")
@click.argument("name")
@output_option
@client_options
def describe_command(name: str, form: str, url: str | None, api_key: str | None) -> None:
    """Show a function, its versions, settings and instances.

    Example: hypercast describe tiny-coder
    """
    with connect(url, api_key) as client:
        function = client.json("GET", f"/admin/functions/{segment(name)}")
    if form == "json":
        emit_record(function, form)
        return
    emit_record(
        {
            **summary(function),
            **{key: value for key, value in function["scaling"].items() if not key.endswith("instances")},
            "versions": function["versions"],
            "context_length": function["current"]["context_length"],
            "description": function["current"]["description"],
            **({"live_decision": function["live"]["reason"]} if function["live"] else {}),
        },
        form,
    )
    if form == "table" and function["instances"]:
        click.echo()
        emit_rows(
            function["instances"], ("instance_id", "node", "version", "state", "start_kind", "source"), form
        )
    if form == "table" and function["live"] and function["live"]["pipelines"]:
        click.echo()
        emit_rows([pipeline(one) for one in function["live"]["pipelines"]], PIPELINE_COLUMNS, form)


@click.command("rollback")
@click.argument("name")
@click.option("--to", "version", type=int, help="The version to go back to (default: the one before).")
@client_options
def rollback_command(name: str, version: int | None, url: str | None, api_key: str | None) -> None:
    """Make an earlier version current; requests in flight finish on theirs.

    Example: hypercast rollback tiny-coder --to 3
    """
    with connect(url, api_key) as client:
        function = client.json(
            "POST", f"/admin/functions/{segment(name)}/rollback", json={"version": version}
        )
    note(f"{name} is at version {function['current']['version']}")


@click.command("delete")
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@client_options
def delete_command(name: str, yes: bool, url: str | None, api_key: str | None) -> None:
    """Delete a function and its versions. Bills stay.

    Example: hypercast delete old-model --yes
    """
    if not yes and not sys.stdin.isatty():
        raise UsageError(f"nobody is there to ask: add --yes to delete {name}")
    if not yes:
        click.confirm(f"Delete {name} and all its versions?", abort=True, err=True)
    with connect(url, api_key) as client:
        client.request("DELETE", f"/admin/functions/{segment(name)}")
    note(f"deleted {name}")
