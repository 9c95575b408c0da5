"""`nodes`: the nodes of the cluster and what each holds."""

from collections import Counter
from dataclasses import fields
from typing import Any

import click

from cli.client import Client
from cli.cluster_view import used
from cli.health import warn_if_unhealthy
from cli.options import client_options, output_option, watch_option
from cli.output import emit_rows, render
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
    Column(field="state", state=True),
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
