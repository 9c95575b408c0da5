"""`list`, `describe`, `rollback` and `delete`."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from cli.client import Client, segment
from cli.commands.share import shared
from cli.completion import function_names
from cli.errors import CliError, ForbiddenError, UsageError
from cli.health import warn_if_unhealthy
from cli.options import client_options, output_option, watch_option
from cli.output import emit_record, emit_rows, render, write, write_fields
from cli.progress import note
from cli.refresh import Frame, watch_table
from cli.tables import Column, Row
from cli.values import age_of, duration, human_bytes, source_at, utc
from registry.records.function import ScaleDown

LIST_FIELDS = (
    *("name", "version", "task", "state", "architecture", "dtype", "bytes", "image"),
    *("ready", "starting", "min", "max", "created_at", "updated_at", "owner", "visibility", "shared_with"),
    *("source", "revision"),
)
LIST_COLUMNS = (
    Column(field="name", shrink=16),
    Column(field="version", numeric=True, drop=2),
    Column(field="task", drop=3),
    Column(field="state", state=True),
    Column(field="ready", numeric=True),
    Column(field="starting", numeric=True, wide=True),
    Column(field="min", numeric=True, wide=True),
    Column(field="max", numeric=True, wide=True, shown=lambda row: str(row["max"] or "all nodes")),
    Column(field="bytes", heading="SIZE", numeric=True, drop=1),
    Column(field="age", numeric=True, shown=lambda row: age_of(row["updated_at"])),
    Column(field="owner", shrink=8, drop=4, shown=lambda row: row["owner"] or "-"),
    Column(field="visibility", wide=True),
    Column(field="architecture", wide=True),
    Column(field="dtype", wide=True),
    Column(field="image", wide=True, shown=lambda row: (row["image"] or "")[:12]),
    Column(field="source", wide=True, shown=lambda row: pinned(row)),
)
MODEL_COLUMNS = (
    Column(field="name", shrink=16),
    Column(field="age", numeric=True, shown=lambda row: age_of(row["created_at"])),
)
VERSION_COLUMNS = (
    Column(field="version", numeric=True),
    Column(field="current", shown=lambda row: "yes" if row["current"] else ""),
    Column(field="created_at", heading="CREATED"),
    Column(field="architecture", shrink=12, drop=1),
    Column(field="dtype", drop=2),
    Column(field="image_bytes", heading="SIZE", numeric=True),
    Column(field="image", shown=lambda row: (row["image"] or "")[:12], drop=4),
    Column(field="deployed_by", heading="DEPLOYED BY KEY", drop=3),
    Column(field="revision", shown=lambda row: row.get("revision", "")[:12], drop=5),
)
INSTANCE_COLUMNS = (
    Column(field="instance_id", heading="INSTANCE", shrink=14),
    Column(field="node", shrink=8, shown=lambda row: nodes_of(row)),
    Column(field="version", numeric=True, drop=2),
    Column(field="state", state=True),
    Column(field="start_kind", heading="START", drop=3),
    Column(field="source", heading="LOADED FROM", drop=4),
    Column(field="age", numeric=True, shown=lambda row: age_of(row["since"]), drop=1),
    Column(field="error", shrink=12, wide=True),
)
PIPELINE_COLUMNS = (
    Column(field="pipeline", shrink=10),
    Column(field="stages", heading="STAGES [FIRST, LAST LAYER)", shrink=20),
    Column(field="last_stage", drop=1),
    Column(field="tokens_per_s", heading="RATE", numeric=True, drop=2),
    Column(field="switched", numeric=True, drop=3),
)
_PATHS = {"embed": "/v1/embeddings"}


def summary(function: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of one function that `list` shows."""
    current = function["current"]
    scaling = function["scaling"]
    states = [instance["state"] for instance in function["instances"]]
    ready = states.count("ready")
    starting = states.count("starting") + states.count("loading")
    return {
        "name": function["name"],
        "version": current["version"],
        "task": current["task"],
        "state": "ready" if ready else "loading" if starting else "asleep",
        "architecture": current["architecture"],
        "dtype": current["dtype"],
        "bytes": current["image_bytes"],
        "image": current["image"],
        "ready": ready,
        "starting": starting,
        "min": scaling["min_instances"],
        "max": scaling["max_instances"],
        "created_at": function["created_at"],
        "updated_at": current["created_at"],
        "owner": function["owner"],
        "visibility": function["visibility"],
        "shared_with": function["shared_with"],
        "source": current.get("source", ""),
        "revision": current.get("revision", ""),
    }


def pinned(version: Row) -> str:
    """Return where a version's model is from, with its commit on a hub; "" for a local one."""
    return source_at(version.get("source", ""), version.get("revision", "")[:12])


def pipeline(one: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of one pipeline of loading nodes that `describe` shows."""
    stages = [f"{stage['node']}[{stage['first']},{stage['last']})" for stage in one["stages"]]
    return {
        "pipeline": f"{one['pipeline_id']}.{one['epoch']}",
        "stages": " ".join(stages),
        "last_stage": one["stages"][one["head"]]["node"],
        "tokens_per_s": round(one["rate"], 2),
        "switched": len(one["switched"]),
    }


def nodes_of(instance: Row) -> str:
    """Return the node of an instance; of a group all, each with its layers `[first, last)`."""
    group = instance.get("group")
    if not group:
        return str(instance["node"])
    return " ".join(f"{one['node']}[{one['first']},{one['last']})" for one in group["members"])


@click.command("list")
@watch_option
@output_option
@client_options
def list_command(watch: bool, form: str, client: Client) -> None:
    """List functions.

    READY is the number of instances that serve. A key of the role `deployer` sees those of its tenant, and
    in outline those which it may call; a key of the role `caller` only the names of these.

    \b
    Examples:
      hypercast list
      hypercast list -o wide
      hypercast list -o json
      hypercast list --watch
    """
    if watch:
        watch_table(
            client,
            ("functions", "instances"),
            lambda: Frame(text=render(_fetch(client), LIST_COLUMNS, (), form)),
        )
        return
    try:
        rows = _fetch(client)
    except ForbiddenError:
        emit_rows(callable_functions(client), MODEL_COLUMNS, ("name", "created_at"), form)
        return
    warn_if_unhealthy(client)
    emit_rows(rows, LIST_COLUMNS, LIST_FIELDS, form)


def _fetch(client: Client) -> list[dict[str, Any]]:
    return [summary(function) for function in client.json("GET", "/admin/functions")["functions"]]


def callable_functions(client: Client) -> list[dict[str, Any]]:
    """Return the functions that the key may call."""
    models = client.json("GET", "/v1/models")["data"]
    return [{"name": model["id"], "created_at": model["created"]} for model in models]


@click.command("describe")
@click.argument("name", shell_complete=function_names)
@output_option
@client_options
def describe_command(name: str, form: str, client: Client) -> None:
    """Show the settings, versions and instances of a function.

    \b
    Examples:
      hypercast describe tiny-coder
      hypercast describe tiny-coder -o json
    """
    function = client.json("GET", f"/admin/functions/{segment(name)}")
    warn_if_unhealthy(client)
    if form in ("json", "csv"):
        emit_record(function, form)
        return
    write_fields(described(function, client.url))
    current = function["current"]["version"]
    history = function.get("history", ())  # not shown to those that may only call it
    versions = [{**one, "current": one["version"] == current} for one in history]
    live = function["live"] or {}
    for rows, columns in (
        (versions, VERSION_COLUMNS),
        (function["instances"], INSTANCE_COLUMNS),
        ([pipeline(one) for one in live.get("pipelines", ())], PIPELINE_COLUMNS),
    ):
        _emit_section(rows, columns, form)


def _emit_section(rows: Sequence[Row], columns: Sequence[Column], form: str) -> None:
    if rows:
        write("\n")
        emit_rows(rows, columns, (), form)


def described(function: dict[str, Any], url: str) -> list[tuple[str, str]]:
    """Return the labelled values that `describe` shows first."""
    row, current, scaling = summary(function), function["current"], function["scaling"]
    live = function["live"] or {}
    ready, starting = row["ready"], row["starting"]
    state = f"{row['state']} ({ready} ready, {starting} starting)"
    model = [current["architecture"], current["dtype"]]
    if current["context_length"]:
        model.append(f"context of {current['context_length']} tokens")
    most = scaling["max_instances"]
    shown = {
        "Name": function["name"],
        "State": state,
        "URL": call_url(function, url),
        "Description": current["description"],
        "Created": f"{utc(function['created_at'])} ({age_of(function['created_at'])} ago)",
        "Version": f"{current['version']}, deployed {age_of(current['created_at'])} ago"
        + (f" by key {current['deployed_by']}" if current.get("deployed_by") else ""),
        "Rollout": rolled_out(function.get("rollout")),
        "Owner": shared(function),
        "Task": current["task"],
        "Model": ", ".join(part for part in model if part),
        "Source": source_at(current.get("source", ""), current.get("revision", "")),
        "Secrets": ", ".join(current.get("secrets", ())),
        "Image": image(current),
        "Instances": f"{scaling['min_instances']} to {'one per node' if most is None else most}, "
        + scaled_by(scaling),
        "Serving": serving_text(scaling, live.get("roles", {})),
        "Decision": decided(function.get("decision")),
        "Keep-alive": f"stops after {duration(scaling['keep_alive_s'])} without requests; "
        f"stays in host memory for {duration(scaling['host_keep_alive_s'])}"
        + ("" if scaling.get("host_copies", 1) else ", and no copy is kept"),
        "Live loading": f"{scaling['live']} (serve requests while loading; "
        f"target time to first token {duration(scaling['ttft_target_s'])})",
        "Last start": live.get("reason", ""),
    }
    return [(label, text) for label, text in shown.items() if text]


def rolled_out(rollout: dict[str, Any] | None) -> str:
    """Return the last rollout in one line."""
    if not rollout:
        return ""
    plan, state = rollout["plan"], rollout["state"].replace("_", " ")
    text = f"version {plan['candidate']} {state} since {age_of(rollout['since'])}"
    if rollout["state"] in ("starting", "running"):
        return f"{text}, {plan['percent']:g} % of the requests"
    return f"{text}: {rollout['reason']}"


def scaled_by(scaling: dict[str, Any]) -> str:
    """Return what the number of instances follows."""
    if scaling["policy"] == "load":
        by_start = scaling.get("scale_down") == ScaleDown.START
        down = "the time of a start" if by_start else duration(scaling["scale_down_delay_s"])
        return (
            f"by load: first token within {duration(scaling['ttft_target_s'])}, others every "
            f"{duration(scaling['tbt_target_s'])}; down after {down}"
        )
    return f"another above {scaling['target_concurrency']} concurrent requests each"


def serving_text(scaling: dict[str, Any], roles: dict[str, str]) -> str:
    """Return how many instances have which role, "" for colocated serving."""
    if scaling.get("serving") != "disaggregated":
        return ""
    counts = Counter(roles.values())
    if not counts:
        return "disaggregated (while there are fewer than two instances, each does both)"
    return f"disaggregated: {counts['prefill']} for prompts, {counts['decode']} to decode"


def decided(decision: dict[str, Any] | None) -> str:
    """Return the last scaling decision in one line."""
    if not decision:
        return ""
    count = decision["desired"]
    return f"{count} instance{'s' * (count != 1)} {age_of(decision['at'])} ago: {decision['reason']}"


def image(version: dict[str, Any]) -> str:
    """Return the image of a version in one line."""
    if not version["image"]:
        return "none (a handler)"
    size = human_bytes(version["image_bytes"])
    return f"{version['image'][:12]}, {size} in {version['blocks']} blocks"


def call_url(function: dict[str, Any], url: str) -> str:
    """Return the address at which to call a function."""
    name, current = function["name"], function["current"]
    if current["task"] == "generate":
        path = "/v1/completions"
    else:
        path = _PATHS.get(current["task"], f"/functions/{segment(name)}/invoke")
    model = "" if path.startswith("/functions") else f' with "model": "{name}"'
    return f"POST {url}{path}{model}"


@click.command("rollback")
@click.argument("name", shell_complete=function_names)
@click.option("--to", "version", type=int, help="Version to return to.  [default: the one before]")
@output_option
@client_options
def rollback_command(name: str, version: int | None, form: str, client: Client) -> None:
    """Make an earlier version current. Requests in flight finish on theirs.

    \b
    Examples:
      hypercast rollback tiny-coder
      hypercast rollback tiny-coder --to 3
    """
    path = f"/admin/functions/{segment(name)}"
    before = client.json("GET", path)["current"]["version"]
    function = client.json("POST", f"{path}/rollback", json={"version": version})
    now = function["current"]["version"]
    if form in ("json", "csv"):
        emit_record({"name": name, "version": now, "previous_version": before}, form)
    note(f"{name}: version {now} (was {before})")


@click.command("delete")
@click.argument("name", shell_complete=function_names)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@output_option
@client_options
def delete_command(name: str, yes: bool, form: str, client: Client) -> None:
    """Delete a function with all its versions. Usage records stay.

    \b
    Examples:
      hypercast delete old-model
      hypercast delete old-model --yes
    """
    if not yes and not sys.stdin.isatty():
        raise UsageError(f"cannot ask for confirmation without a terminal: add --yes to delete {name}")
    if not yes and not click.confirm(f"Delete {name} and all its versions?", err=True):
        raise CliError(f"{name} was not deleted")
    deleted = client.json("DELETE", f"/admin/functions/{segment(name)}")
    if form in ("json", "csv"):
        emit_record(deleted, form)
    note(f"deleted {name}")
