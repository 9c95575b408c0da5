"""`nodes`: who is there, and what each holds."""

from typing import Any

import click

from cli.options import client_options, connect, output_option
from cli.output import emit_rows
from cli.progress import human_bytes

COLUMNS = ("id", "host", "pid", "state", "device", "gpu", "host_memory", "instances")


def row(node: dict[str, Any]) -> dict[str, Any]:
    """A node as the table shows it."""
    rate = node.get("link_rate_bytes_s")
    return {
        **node,
        "gpu": used(node["gpu_bytes"], node["gpu_free_bytes"]),
        "host_memory": used(node["host_bytes"], node["host_free_bytes"]),
        "instances": [f"{item['function']}:{item['version']}={item['state']}" for item in node["instances"]],
        "link_rate": f"{human_bytes(rate)}/s" if rate else None,
    }


def used(total: int, free: int) -> str:
    return f"{human_bytes(total - free)} of {human_bytes(total)}"


@click.command("nodes")
@output_option
@client_options
def nodes_command(form: str, url: str | None, api_key: str | None) -> None:
    """List nodes, their memory, instances and counters.

    Example: hypercast nodes -o json
    """
    with connect(url, api_key) as client:
        nodes = client.json("GET", "/admin/nodes")["nodes"]
    capped = any(node.get("link_rate_bytes_s") for node in nodes)
    columns = (*COLUMNS, "link_rate") if capped or form == "csv" else COLUMNS
    emit_rows(nodes if form == "json" else [row(node) for node in nodes], columns, form)
