"""`scale`, `warm` and `evict`: where a function's image is and how many instances serve it."""

import json
from typing import Any

import click

from cli.client import Client, raise_for, segment
from cli.completion import function_names, node_names
from cli.errors import CliError, ForbiddenError, UsageError
from cli.options import client_options, output_option, scaling_options
from cli.output import emit_record
from cli.progress import StageLine, note
from cli.values import duration

_ON = click.option(
    "--on",
    "on",
    multiple=True,
    metavar="NODE",
    shell_complete=node_names,
    help="Only on this node (repeatable).",
)


_PLACES = {"gpu": "gpu memory", "host": "host memory", "disk": "the disk tier"}
_CHANGED = {
    "live": "live loading",
    "policy": "scaling by",
    "serving": "serving",
    "scale_down": "scaling down after",
    "scale_down_delay_s": "delay of scaling down",
    "ttft_target_s": "target time to first token",
    "tbt_target_s": "target time between tokens",
}


def follow(client: Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Show the stages of an NDJSON stream; return what its other lines have. Raises CliError for an error."""
    line, found = StageLine(), dict[str, Any]()
    try:
        with client.stream("POST", path, json=body) as response:
            raise_for(response)
            for text in response.iter_lines():
                event = json.loads(text) if text.strip() else {}
                if "error" in event:
                    raise CliError(event["error"]["message"])
                if "stage" in event:
                    line.show(event["stage"], event.get("fraction", 0.0))
                else:
                    found |= event
    finally:
        line.end()
    return found


@click.command("scale")
@click.argument("name", shell_complete=function_names)
@click.option(
    "--instances", type=click.IntRange(0, 4096), metavar="N", help="Number of instances (0: asleep)."
)
@click.option(
    "--on",
    "on",
    multiple=True,
    metavar="NODE",
    shell_complete=node_names,
    help="Place them on this node (repeatable).",
)
@click.option(
    "--wait/--no-wait", default=True, help="Return when the number is reached, or at once.  [default: wait]"
)
@scaling_options
@output_option
@client_options
def scale_command(
    name: str,
    instances: int | None,
    on: tuple[str, ...],
    wait: bool,
    form: str,
    client: Client,
    **changes: Any,
) -> None:
    """Set the current number of instances (the autoscaler may change it later), or settings of scaling.

    \b
    Examples:
      hypercast scale tiny-coder --instances 3
      hypercast scale tiny-coder --instances 1 --on node-2
      hypercast scale tiny-coder --instances 0
      hypercast scale tiny-coder --live pipeline
      hypercast scale tiny-coder --scaling load --scale-down-delay 500ms
      hypercast scale tiny-coder --serving disaggregated
    """
    settings = {key: value for key, value in changes.items() if value is not None}
    if instances is None and not settings:
        raise UsageError("name --instances, or a setting such as --live, --scaling or --ttft-target")
    if settings:
        client.request("PATCH", f"/admin/functions/{segment(name)}", json={"scaling": settings})
        for key, text in _CHANGED.items():
            if key in settings:
                value = settings[key]
                note(f"{name}: {text} {duration(value) if key.endswith('_s') else value}")
    if instances is not None:
        client.request(
            "POST",
            f"/admin/functions/{segment(name)}/scale",
            json={"instances": instances, "on": list(on), "wait": wait},
        )
        count = f"{instances} instance{'' if instances == 1 else 's'}"
        note(f"{name}: {count}" if wait else f"{name}: {count} requested")
    if form in ("json", "csv"):
        emit_record({"name": name, "instances": instances, "on": list(on), "waited": wait, **settings}, form)


@click.command("warm")
@click.argument("name", shell_complete=function_names)
@click.option(
    "--nodes", type=click.IntRange(1, 4096), metavar="N", help="Number of nodes.  [default: every host]"
)
@_ON
@output_option
@client_options
def warm_command(name: str, nodes: int | None, on: tuple[str, ...], form: str, client: Client) -> None:
    """Load a function's image into host memory, without starting an instance.

    \b
    Examples:
      hypercast warm tiny-coder
      hypercast warm tiny-coder --nodes 2
      hypercast warm tiny-coder --on node-1
    """
    follow(client, f"/admin/functions/{segment(name)}/warm", {"nodes": nodes, "on": list(on)})
    if form in ("json", "csv"):
        held = holders(client, name, "host")
        shown = None if held is None else sorted(held)
        emit_record({"name": name, "tier": "host", "nodes": shown}, form)
    note(f"{name} is in host memory")


@click.command("evict")
@click.argument("name", shell_complete=function_names)
@click.option(
    "--tier",
    type=click.Choice(["gpu", "host", "disk"]),
    default="host",
    show_default=True,
    help="Where to drop it.",
)
@_ON
@output_option
@client_options
def evict_command(name: str, tier: str, on: tuple[str, ...], form: str, client: Client) -> None:
    """Drop a function's idle image from GPU memory, host memory or the disk tier.

    The cluster keeps one copy in host memory.

    \b
    Examples:
      hypercast evict tiny-coder
      hypercast evict tiny-coder --tier gpu --on node-1
    """
    before = holders(client, name, tier)
    client.request("POST", f"/admin/functions/{segment(name)}/drop", json={"tier": tier, "on": list(on)})
    after = holders(client, name, tier)
    if before is None or after is None:
        if form in ("json", "csv"):
            emit_record({"name": name, "tier": tier, "dropped": None, "kept": None}, form)
        note(f"{name}: dropped what was idle from {_PLACES[tier]}")
        return
    dropped = sorted(set(before) - set(after))
    kept = sorted(node for node in after if not on or node in on)
    if form in ("json", "csv"):
        emit_record({"name": name, "tier": tier, "dropped": dropped, "kept": kept}, form)
    # Nodes of one host share its copy in host memory and on the disk.
    copies = len(dropped) if tier == "gpu" else len({before[node] for node in dropped})
    text = f"{name}: dropped {copies} {'copy' if copies == 1 else 'copies'} from {_PLACES[tier]}"
    if kept:
        reason = "in use" if tier == "gpu" else "in use, or the cluster's last copy"
        text += f" (kept on {', '.join(kept)}: {reason})"
    note(text)


def holders(client: Client, name: str, tier: str) -> dict[str, str] | None:
    """Return the nodes that hold the image of a function in a tier, each with its host.

    None for a key that may not see nodes, such as a deployer's.
    """
    try:
        nodes = client.json("GET", "/admin/nodes")["nodes"]
    except ForbiddenError:
        return None
    return {
        node["id"]: node["host"]
        for node in nodes
        if any(held.partition(":")[0] == name for held in node["tiers"].get(tier, ()))
    }
