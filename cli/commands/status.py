"""`status`: the platform on one screen."""

import json
from datetime import UTC, datetime
from typing import Any

import click

from cli.board import ClusterBoard, counted
from cli.client import Client, server_events
from cli.cluster_view import tables
from cli.errors import CliError, ForbiddenError
from cli.feed import PATH
from cli.options import client_options, output_option
from cli.output import emit_record, write, write_fields
from cli.values import money
from registry.records.quota import DAY_S

ROWS = 40  # of all tables together
_ORDER = ("ready", "loading", "starting", "asleep", "running", "complete")


@click.command("status")
@output_option
@client_options
def status_command(form: str, client: Client) -> None:
    """Show the gateway, nodes, functions, casts and today's cost on one screen.

    What the key may not see is left out. Exits with 1 if the gateway is not ready.

    \b
    Examples:
      hypercast status
      hypercast status -o json
    """
    health = client.json("GET", "/health", expect=(200, 503))
    key = client.json("GET", "/admin/me")
    board, cost = board_of(client), cost_today(client)
    found: dict[str, Any] = {
        "url": client.url,
        "gateway": key["gateway"],
        "status": health["status"],
        "reasons": health.get("reasons", []),
        "redis": health["state"],
        "tenant": key["tenant"],
        "role": key["role"],
        **({} if board is None else board.totals()),
        "cost_today": cost,
    }
    if form in ("json", "csv"):
        emit_record(found, form)
    else:
        write_fields([(label, text) for label, text in _shown(found, board) if text])
        if board is not None and (text := tables(board, ROWS)):
            write(f"\n{text}")
    if health["status"] != "ready":
        raise CliError(f"the gateway is not ready: {'; '.join(found['reasons']) or 'see its log'}")


def board_of(client: Client) -> ClusterBoard | None:
    """Return the cluster, None if the key may not see it."""
    try:
        with client.stream("GET", PATH, params={"once": "true"}) as response:
            for kind, text in server_events(response):
                if kind == "data":
                    board = ClusterBoard()
                    board.apply(json.loads(text))
                    return board
    except ForbiddenError:
        return None
    raise CliError("the gateway shows nothing of the cluster: it is shutting down")


def cost_today(client: Client) -> dict[str, Any] | None:
    """Return what requests that ended today (UTC) cost, None if the key may not see it."""
    since = datetime.now(UTC).timestamp() // DAY_S * DAY_S
    try:
        answer = client.json("GET", "/admin/usage/report", params={"since": since})
    except ForbiddenError:
        return None
    sums = {field: sum(row[field] for row in answer["rows"]) for field in ("requests", "cost_nanos")}
    return {**sums, "currency": answer["currency"]}


def _shown(found: dict[str, Any], board: ClusterBoard | None) -> list[tuple[str, str]]:
    cost = found["cost_today"]
    state = found["status"] + "".join(f", {reason}" for reason in found["reasons"])
    lines = [
        ("Gateway", f"{found['gateway']} at {found['url']}"),
        ("State", f"{state} (Redis: {found['redis']})"),
        ("Key", f"{found['role']} of tenant {found['tenant']}"),
    ]
    if board is not None:
        lines += [
            ("Nodes", counted(found["nodes"], _ORDER) or "none"),
            ("Functions", counted(found["functions"], _ORDER) or "none"),
            ("Instances", counted(found["instances"], _ORDER) or "none"),
            ("Calls", f"{found['in_flight']} in flight, {found['held']} held"),
            ("Rates", f"{found['requests_s']:.1f} requests/s, {found['tokens_s']:.1f} tokens/s"),
            ("Casts", counted(found["casts"], _ORDER) or "none in the last hour"),
        ]
    if cost is not None:
        count = cost["requests"]
        of = f"{count} request{'s' * (count != 1)}"
        lines.append(("Cost today", f"{money(cost['cost_nanos'], cost['currency'])} for {of}"))
    return lines
