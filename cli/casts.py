"""`casts`: which images move between nodes, by which plan, and how far each node is."""

from collections import defaultdict
from typing import Any

import click

from cli.client import Client
from cli.errors import AuthError, CliError, MissingError, UsageError
from cli.live import Frame, redraw
from cli.options import client_options, connect, output_option, query
from cli.output import cell, emit_record, emit_rows, table
from cli.progress import human_bytes

COLUMNS = ("id", "function", "state", "nodes", "planner", "rate", "received", "faults", "took", "age")
NODE_COLUMNS = (
    "node",
    "host",
    "state",
    "progress",
    "took",
    "rate",
    "received",
    "transports",
    "faults",
    "error",
)
CSV_COLUMNS = (
    *("cast_id", "function", "version", "state", "done", "targets", "planner", "nbytes"),
    *("bytes_s", "received", "faults", "seconds", "age_s"),
)
NODE_CSV_COLUMNS = (
    *("node", "host", "tier", "planned", "state", "held", "blocks", "seconds", "bytes_s"),
    *("received", "transports", "faults", "error"),
)
BAR = 20  # characters
MOST_REASONS = 12


@click.command("casts")
@click.argument("cast_id", required=False)
@click.option("--function", help="Only casts of this function.")
@click.option(
    "-w", "--watch", is_flag=True, help="Draw it anew every second: until Ctrl-C, or one cast's end."
)
@output_option
@client_options
def casts_command(
    cast_id: str | None,
    function: str | None,
    watch: bool,
    form: str,
    url: str | None,
    api_key: str | None,
) -> None:
    """Show casts (images on their way from those who hold them to other nodes) of the last hour.

    With the id of one, or the beginning of an id: its plan, why it was chosen, and each node's part. Rates
    are in bytes per second, of all its nodes together in the list.

    \b
    Examples:
      hypercast casts --watch
      hypercast casts 4f1c
      hypercast casts 4f1c --watch
      hypercast casts --function tiny-coder -o json
    """
    if watch and form != "table":
        raise UsageError("--watch draws tables: leave -o out")
    with connect(url, api_key) as client:
        if watch:
            redraw(_Watched(client, cast_id, function).frame)
            return
        casts = _fetch(client, function, cast_id, summary=cast_id is None and form != "json")
    if cast_id is None and form == "table":
        emit_rows([row(cast) for cast in casts], COLUMNS, form)
    elif cast_id is None:
        emit_rows(casts, CSV_COLUMNS, form)
    elif form == "table":
        click.echo(shown(pick(casts, cast_id)), nl=False)
    elif form == "csv":
        emit_rows(pick(casts, cast_id)["nodes"], NODE_CSV_COLUMNS, form)
    else:
        emit_record(pick(casts, cast_id), form)


class _Watched:
    """What `--watch` draws. A gateway that is away for a while ends it only before the first answer."""

    def __init__(self, client: Client, cast_id: str | None, function: str | None) -> None:
        self._client = client
        self._cast_id = cast_id
        self._function = function
        self._text = ""

    def frame(self) -> Frame:
        try:
            casts = _fetch(self._client, self._function, self._cast_id, summary=self._cast_id is None)
        except (AuthError, UsageError):
            raise
        except CliError as error:
            if not self._text:
                raise
            return Frame(text=f"{self._text}(asking again: {error})\n")
        if self._cast_id is None:
            self._text = table([row(cast) for cast in casts], COLUMNS)
            return Frame(text=self._text)
        cast = pick(casts, self._cast_id)
        self._text = shown(cast)
        return Frame(text=self._text, last=cast["state"] != "running")


def _fetch(
    client: Client, function: str | None, cast_id: str | None, *, summary: bool
) -> list[dict[str, Any]]:
    asked = query(function=function, cast=cast_id) | {"summary": str(summary).lower()}
    found: list[dict[str, Any]] = client.json("GET", "/admin/casts", params=asked)["casts"]
    return found


def pick(casts: list[dict[str, Any]], cast_id: str) -> dict[str, Any]:
    """The cast of this id, or of the one id that begins so. Raises MissingError, UsageError."""
    found = [cast for cast in casts if cast["cast_id"].startswith(cast_id)]
    exact = [cast for cast in found if cast["cast_id"] == cast_id]
    if not found:
        raise MissingError(f"there is no cast {cast_id!r} of the last hour: see `hypercast casts`")
    if not exact and len(found) > 1:
        raise UsageError(f"{cast_id!r} begins the ids of {len(found)} casts: give more of it")
    return (exact or found)[0]


def row(cast: dict[str, Any]) -> dict[str, Any]:
    """A cast as the list shows it."""
    return {
        "id": cast["cast_id"],
        "function": f"{cast['function']}:{cast['version']}",
        "state": cast["state"],
        "nodes": f"{cast['done']}/{cast['targets']}",
        "planner": cast["planner"],
        "rate": rate(cast["bytes_s"]),
        "received": received(cast["received"]),
        "faults": cast["faults"],
        "took": seconds(cast["seconds"]),
        "age": seconds(cast["age_s"]),
    }


def shown(cast: dict[str, Any]) -> str:
    """A cast by itself: its plan, then a line for each node."""
    sources = [node["node"] for node in cast["nodes"] if node["state"] == "source"]
    late = sum(not node["planned"] for node in cast["nodes"])
    plan = (
        f"{cast['planner']}, {cast['blocks']} blocks of {human_bytes(cast['block_bytes'])}, "
        f"from {cell(sources)} to {cast['targets']} nodes"
        + (f", {late} of them joined later" if late else "")
    )
    image = f"{cast['function']}:{cast['version']}, {human_bytes(cast['nbytes'])}"
    took = (
        f"{cast['state']} after {seconds(cast['seconds'])}, {cast['done']} of {cast['targets']} have it all"
    )
    head = {"cast": cast["cast_id"], "image": image, "plan": plan, "because": cast["reason"], "state": took}
    lines = "".join(f"{name:<8} {text}\n" for name, text in head.items())
    rows = [node_row(node) for node in cast["nodes"]]
    used = [name for name in NODE_COLUMNS if name in NODE_COLUMNS[:4] or any(one[name] for one in rows)]
    return f"{lines}\n{table(rows, used)}{why(cast['nodes'])}"


def node_row(node: dict[str, Any]) -> dict[str, Any]:
    """A node as the table of one cast shows it."""
    gives = node["state"] == "source"
    return {
        "node": node["node"],
        "host": node["host"],
        "state": node["state"] if node["planned"] else f"{node['state']} (late)",
        "progress": _given_from(node["tier"]) if gives else bar(node["held"], node["blocks"]),
        "took": seconds(node["seconds"]) if node["seconds"] else "",
        "rate": rate(node["bytes_s"]),
        "received": received(node["received"]),
        "transports": by_transport(node["transports"]),
        "faults": node["faults"],
        "error": node["error"],
    }


def _given_from(tier: str) -> str:
    return "reads the store" if tier in ("none", "") else f"gives from {tier}"


def bar(held: int, blocks: int) -> str:
    """How much of it is there; only all of it is a full bar."""
    part = held / blocks if blocks else 1.0
    full = int(part * BAR)
    return f"{'█' * full}{'░' * (BAR - full)} {int(part * 100):3d}%"


def by_transport(transports: dict[str, str]) -> str:
    """Each transport, and the peers that were pulled from by it."""
    peers: dict[str, list[str]] = defaultdict(list)
    for peer, text in sorted(transports.items()):
        peers[text.partition(":")[0]].append(peer)
    return "; ".join(f"{name} ({' '.join(names)})" for name, names in peers.items())


def why(nodes: list[dict[str, Any]]) -> str:
    """Why each pair uses its transport, as far as there is room."""
    lines = [
        f"{node['node']} from {peer} over {reason}\n"
        for node in nodes
        for peer, reason in sorted(node["transports"].items())
    ]
    if len(lines) > MOST_REASONS:
        lines[MOST_REASONS:] = [f"… and {len(lines) - MOST_REASONS} more: -o json has them\n"]
    return "\n" + "".join(lines) if lines else ""


def received(counts: dict[str, int]) -> str:
    return ", ".join(f"{human_bytes(nbytes)} {name}" for name, nbytes in counts.items() if nbytes)


def rate(bytes_s: float) -> str:
    """In GB/s, or MB/s where that would be none."""
    if not bytes_s:
        return ""
    return f"{bytes_s / 1e9:.2f} GB/s" if bytes_s >= 1e8 else f"{bytes_s / 1e6:.1f} MB/s"


def seconds(length_s: float) -> str:
    if length_s < 120:
        return f"{length_s:.1f} s"
    return f"{length_s / 60:.0f} min"
