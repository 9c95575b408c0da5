"""`nodes`, `cordon`, `uncordon` and `drain`: the nodes of the cluster, what each holds, and their upkeep."""

from collections import Counter
from dataclasses import fields
from typing import Any

import click

from cli.client import Client, segment
from cli.cluster_view import used
from cli.completion import node_names
from cli.health import warn_if_unhealthy
from cli.options import client_options, output_option, watch_option
from cli.output import emit_record, emit_rows, render
from cli.progress import note
from cli.refresh import Frame, watch_table
from cli.tables import Column, Row
from cli.values import age_of, human_bytes
from registry.records.node import NodeRecord

FIELDS = (
    *(field.name for field in fields(NodeRecord) if field.name != "counters"),
    *("tiers.gpu", "tiers.host", "tiers.disk", "functions", "instances"),
)
COLUMNS = (
    Column(field="id", heading="NODE", shrink=10),
    Column(field="host", shrink=8, drop=3),
    Column(field="pid", numeric=True, wide=True),
    Column(field="state", state=True, shown=lambda row: node_state(row)),
    Column(field="device", shrink=8, drop=4),
    Column(
        field="gpu", heading="GPU MEMORY", shown=lambda row: used(row["gpu_bytes"], row["gpu_free_bytes"])
    ),
    Column(field="host_memory", shown=lambda row: used(row["host_bytes"], row["host_free_bytes"]), drop=2),
    Column(field="leaf", wide=True),
    Column(field="link_rate", wide=True, shown=lambda row: link_rate(row)),
    Column(field="functions", shrink=16, shown=lambda row: instances(row)),
    Column(
        field="images", heading="IN HOST MEMORY", wide=True, shown=lambda row: " ".join(row["tiers"]["host"])
    ),
    Column(field="age", numeric=True, shown=lambda row: age_of(row["started_at"]), drop=1),
)


def node_state(node: Row) -> str:
    """Return the state of a node; of one that is cordoned, that."""
    return "cordoned" if node.get("cordoned") and node["state"] == "ready" else str(node["state"])


def link_rate(node: Row) -> str:
    """Return the cap on a node's transfers."""
    rate = node.get("link_rate_bytes_s")
    return f"{human_bytes(rate)}/s" if rate else ""


def instances(node: Row) -> str:
    """Return the functions that a node runs, with the state of those that do not serve."""
    found = Counter(
        f"{one['function']}:{one['version']}" + ("" if one["state"] == "ready" else f" ({one['state']})")
        for one in node["instances"]
    )
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in found.items())


def with_functions(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node with the functions that it runs, as a list of names."""
    return {**node, "functions": [f"{one['function']}:{one['version']}" for one in node["instances"]]}


@click.command("nodes")
@watch_option
@output_option
@client_options
def nodes_command(watch: bool, form: str, client: Client) -> None:
    """List nodes with their memory and instances.

    \b
    Examples:
      hypercast nodes
      hypercast nodes -o wide
      hypercast nodes -o json
      hypercast nodes --watch
    """
    if watch:
        watch_table(
            client, ("nodes", "instances"), lambda: Frame(text=render(_fetch(client), COLUMNS, (), form))
        )
        return
    nodes = _fetch(client)
    warn_if_unhealthy(client)
    counters = sorted({f"counters.{name}" for node in nodes for name in node["counters"]})
    emit_rows(nodes, COLUMNS, (*FIELDS, *counters), form)


def _fetch(client: Client) -> list[dict[str, Any]]:
    return [with_functions(node) for node in client.json("GET", "/admin/nodes")["nodes"]]


@click.command("cordon")
@click.argument("node", shell_complete=node_names)
@output_option
@client_options
def cordon_command(node: str, form: str, client: Client) -> None:
    """Start no further instances on a node, until `uncordon`. What runs there goes on.

    It lasts until the node's process ends: one that starts again is not cordoned.

    \b
    Examples:
      hypercast cordon node-1
    """
    _emit(client.json("POST", f"/admin/nodes/{segment(node)}/cordon"), form)
    note(f"{node}: no further instances are started there")


@click.command("uncordon")
@click.argument("node", shell_complete=node_names)
@output_option
@client_options
def uncordon_command(node: str, form: str, client: Client) -> None:
    """Allow starts on a node again, after `cordon` or `drain`.

    \b
    Examples:
      hypercast uncordon node-1
    """
    _emit(client.json("POST", f"/admin/nodes/{segment(node)}/uncordon"), form)
    note(f"{node}: instances may be started there")


@click.command("drain")
@click.argument("node", shell_complete=node_names)
@click.option(
    "--wait/--no-wait", default=True, help="Return when nothing runs there, or at once.  [default: wait]"
)
@output_option
@client_options
def drain_command(node: str, wait: bool, form: str, client: Client) -> None:
    """Cordon a node, and move what runs there to other nodes.

    An instance stops once others are ready, and its calls end on it, so that no request fails. Then the node
    can be stopped. Its copies of images in host memory stay until it is.

    \b
    Examples:
      hypercast drain node-1
      hypercast drain node-1 --no-wait
    """
    drained = client.json("POST", f"/admin/nodes/{segment(node)}/drain", json={"wait": wait})
    _emit(drained, form)
    left = [one["instance_id"] for one in drained["instances"]]
    note(f"{node}: still runs {', '.join(left)}" if left else f"{node}: drained")


def _emit(answer: dict[str, Any], form: str) -> None:
    if form in ("json", "csv"):
        emit_record(answer, form)
