"""`casts`: which images move between nodes, by which plan, with each node's progress."""

from collections import defaultdict
from typing import Any

import click

from cli.client import Client
from cli.cluster_view import bar
from cli.completion import function_names
from cli.errors import MissingError, UsageError
from cli.options import client_options, output_option, query, watch_option
from cli.output import emit_record, emit_rows, render, write
from cli.refresh import Frame, watch_table
from cli.tables import Column, Row, colours_wanted, fields, terminal_width, wrapped
from cli.values import age, human_bytes

COLUMNS = (
    Column(field="cast_id", heading="CAST", shrink=8),
    Column(field="function", shrink=12, shown=lambda row: f"{row['function']}:{row['version']}"),
    Column(field="state", state=True),
    Column(field="nodes", numeric=True, shown=lambda row: f"{row['done']}/{row['targets']}"),
    Column(field="planner", drop=3),
    Column(field="bytes_s", heading="RATE", numeric=True, shown=lambda row: rate(row["bytes_s"])),
    Column(field="received", shrink=12, drop=4, shown=lambda row: received(row["received"])),
    Column(field="faults", shrink=8, shown=lambda row: faults(row["faults"]), drop=2),
    Column(field="seconds", heading="TOOK", numeric=True, shown=lambda row: seconds(row["seconds"])),
    Column(field="age_s", heading="AGE", numeric=True, shown=lambda row: age(row["age_s"]), drop=1),
)
NODE_COLUMNS = (
    Column(field="node", shrink=8),
    Column(field="host", shrink=8, drop=4),
    Column(field="state", state=True, shown=lambda row: node_state(row)),
    Column(field="progress", shown=lambda row: progress(row)),
    Column(
        field="seconds",
        heading="TOOK",
        numeric=True,
        shown=lambda row: seconds(row["seconds"]) if row["seconds"] else "",
    ),
    Column(field="bytes_s", heading="RATE", numeric=True, drop=1, shown=lambda row: rate(row["bytes_s"])),
    Column(field="received", shrink=12, drop=3, shown=lambda row: received(row["received"])),
    Column(field="transports", shrink=12, drop=2, shown=lambda row: by_transport(row["transports"])),
    Column(field="faults", shrink=8, shown=lambda row: faults(row["faults"])),
    Column(field="error", shrink=10),
)
FIELDS = (
    *("cast_id", "function", "version", "state", "done", "targets", "planner", "nbytes"),
    *("bytes_s", "received", "faults", "seconds", "age_s"),
    *("image", "blocks", "block_bytes", "reason", "epoch", "started_at"),
)
NODE_FIELDS = (
    *("node", "host", "tier", "planned", "state", "held", "blocks", "seconds", "bytes_s"),
    *("received", "transports", "faults", "error", "updated_at"),
)
MAX_REASONS = 12
_ABSENT = ("cannot be imported", "no RDMA device", "there is none at all")


@click.command("casts")
@click.argument("cast_id", required=False)
@click.option("--function", shell_complete=function_names, help="Only casts of this function.")
@watch_option
@output_option
@client_options
def casts_command(cast_id: str | None, function: str | None, watch: bool, form: str, client: Client) -> None:
    """Show casts of the last hour: model images on their way from nodes that hold them to other nodes.

    With a cast id, or the beginning of one: its plan, the reason for it, and each node's part; --watch ends
    with it. Rates are bytes per second; in the list, the sum over all nodes. JSON has each node's part in the
    list, too; CSV has it with a cast id only, as one row per node.

    \b
    Examples:
      hypercast casts --watch
      hypercast casts 4f1c
      hypercast casts 4f1c --watch
      hypercast casts --function tiny-coder -o json
    """
    if watch:

        def draw() -> Frame:
            casts = _fetch(client, function, cast_id, summary=cast_id is None)
            if cast_id is None:
                return Frame(text=render(casts, COLUMNS, (), form))
            cast = pick(casts, cast_id)
            return Frame(text=shown(cast, form), last=cast["state"] != "running")

        watch_table(client, ("casts", "blocks", "nodes"), draw)
        return
    casts = _fetch(client, function, cast_id, summary=cast_id is None and form != "json")
    if cast_id is None:
        emit_rows(casts, COLUMNS, FIELDS, form)
        return
    cast = pick(casts, cast_id)
    if form == "json":
        emit_record(cast, form)
    elif form == "csv":
        emit_rows(cast["nodes"], NODE_COLUMNS, NODE_FIELDS, form)
    else:
        write(shown(cast, form))


def _fetch(
    client: Client, function: str | None, cast_id: str | None, *, summary: bool
) -> list[dict[str, Any]]:
    parameters = query(function=function, cast=cast_id) | {"summary": str(summary).lower()}
    found: list[dict[str, Any]] = client.json("GET", "/admin/casts", params=parameters)["casts"]
    return found


def pick(casts: list[dict[str, Any]], cast_id: str) -> dict[str, Any]:
    """Return the cast of this id, or of the one id that begins so. Raises MissingError, UsageError."""
    found = [cast for cast in casts if cast["cast_id"].startswith(cast_id)]
    exact = [cast for cast in found if cast["cast_id"] == cast_id]
    if not found:
        raise MissingError(f"there was no cast {cast_id!r} in the last hour: see `hypercast casts`")
    if not exact and len(found) > 1:
        raise UsageError(f"{cast_id!r} begins the ids of {len(found)} casts: use a longer prefix")
    return (exact or found)[0]


def shown(cast: dict[str, Any], form: str) -> str:
    """Return one cast as text: its plan, then a line per node."""
    sources = [node["node"] for node in cast["nodes"] if node["state"] == "source"]
    late = sum(not node["planned"] for node in cast["nodes"])
    plan = (
        f"{cast['planner']}, {cast['blocks']} blocks of {human_bytes(cast['block_bytes'])}, "
        f"from {', '.join(sources)} to {cast['targets']} node{'' if cast['targets'] == 1 else 's'}"
        + (f", {late} of them joined later" if late else "")
    )
    head = [
        ("Cast", cast["cast_id"]),
        ("Image", f"{cast['function']}:{cast['version']}, {human_bytes(cast['nbytes'])}"),
        ("Plan", plan),
        ("Reason", cast["reason"]),
        (
            "State",
            f"{cast['state']} after {seconds(cast['seconds'])}, {cast['done']} of {cast['targets']} complete",
        ),
    ]
    nodes = cast["nodes"]
    columns = [c for c in NODE_COLUMNS if c in NODE_COLUMNS[:4] or any(c.text(node) for node in nodes)]
    lines = fields(head, width=terminal_width(), colour=colours_wanted())
    return f"{lines}\n{render(nodes, columns, (), form)}{why(nodes, wide=form == 'wide')}"


def node_state(node: Row) -> str:
    """Return the state of a node's part, marked where the plan did not have it."""
    return str(node["state"]) if node["planned"] else f"{node['state']} (late)"


def progress(node: Row) -> str:
    """Return how much of the image a node holds, or where a source reads it."""
    if node["state"] != "source":
        return bar(node["held"], node["blocks"])
    return "reads the store" if node["tier"] in ("none", "") else f"sends from {node['tier']}"


def by_transport(transports: dict[str, str]) -> str:
    """Return each transport with the peers that were read from by it."""
    peers: dict[str, list[str]] = defaultdict(list)
    for peer, text in sorted(transports.items()):
        peers[text.partition(":")[0]].append(peer)
    return "; ".join(f"{name} ({' '.join(names)})" for name, names in peers.items())


def why(nodes: list[dict[str, Any]], *, wide: bool = False) -> str:
    """Return why each pair of nodes uses its transport, at most MAX_REASONS lines unless `wide`."""
    lines = [
        f"{node['node']} from {peer} over {reason if wide else brief(reason)}"
        for node in nodes
        for peer, reason in sorted(node["transports"].items())
    ]
    if len(lines) > MAX_REASONS and not wide:
        lines[MAX_REASONS:] = [f"… and {len(lines) - MAX_REASONS} more: see -o json"]
    width = None if wide else terminal_width()
    text = "".join("\n  ".join(wrapped(line, width and width - 2)) + "\n" for line in lines)
    return f"\n{text}" if lines else ""


def brief(reason: str) -> str:
    """Return a reason without the transports that this machine has no hardware or library for."""
    return "; ".join(part for part in reason.split("; ") if not any(words in part for words in _ABSENT))


def received(counts: dict[str, int]) -> str:
    """Return the bytes received by each transport."""
    return ", ".join(f"{human_bytes(nbytes)} {name}" for name, nbytes in counts.items() if nbytes)


def faults(counts: dict[str, int]) -> str:
    """Return the number of faults of each kind."""
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def rate(bytes_s: float) -> str:
    """Return a rate in GB/s, or MB/s below 0.1 GB/s."""
    if not bytes_s:
        return ""
    return f"{bytes_s / 1e9:.2f} GB/s" if bytes_s >= 1e8 else f"{bytes_s / 1e6:.1f} MB/s"


def seconds(length_s: float) -> str:
    """Return a duration in seconds, or minutes from two on."""
    if length_s < 120:
        return f"{length_s:.1f} s"
    return f"{length_s / 60:.0f} min"
