"""`scale`, `warm` and `evict`: where a function's image is and how many instances serve it."""

import json
from typing import Any

import click

from cli.client import Client, raise_for, segment
from cli.errors import CliError, UsageError
from cli.options import DURATION, LIVE, client_options, connect
from cli.progress import StageLine, note


def follow(client: Client, path: str, body: dict[str, Any]) -> None:
    """Show the stages of an NDJSON stream; its `error` line, if any, is raised."""
    line = StageLine()
    try:
        with client.stream("POST", path, json=body) as response:
            raise_for(response)
            for text in response.iter_lines():
                event = json.loads(text) if text.strip() else {}
                if "error" in event:
                    raise CliError(event["error"]["message"])
                if "stage" in event:
                    line.show(event["stage"], event.get("fraction", 0.0))
    finally:
        line.end()


@click.command("scale")
@click.argument("name")
@click.option("--instances", type=click.IntRange(0, 4096), help="How many (0: asleep).")
@click.option("--on", "on", multiple=True, metavar="NODE", help="On this node (may be repeated).")
@click.option("--wait/--no-wait", default=True, help="Return when reached (default) or at once.")
@click.option("--live", type=LIVE, help="From now on: serve while the model arrives?")
@click.option("--ttft-target", type=DURATION, help="From now on: first token that --live auto tries to keep.")
@client_options
def scale_command(
    name: str,
    instances: int | None,
    on: tuple[str, ...],
    wait: bool,
    live: str | None,
    ttft_target: float | None,
    url: str | None,
    api_key: str | None,
) -> None:
    """Set the number of instances once; the autoscaler goes on from there. Or how it serves while it loads.

    \b
    Examples:
      hypercast scale tiny-coder --instances 3
      hypercast scale tiny-coder --instances 1 --on node-2
      hypercast scale tiny-coder --instances 0
      hypercast scale tiny-coder --live pipeline
    """
    changes = {"live": live, "ttft_target_s": ttft_target}
    settings = {key: value for key, value in changes.items() if value is not None}
    if instances is None and not settings:
        raise UsageError("give --instances, --live or --ttft-target")
    with connect(url, api_key) as client:
        if settings:
            client.request("PATCH", f"/admin/functions/{segment(name)}", json={"scaling": settings})
            note(f"{name}: {', '.join(f'{key} {value}' for key, value in settings.items())}")
        if instances is None:
            return
        client.request(
            "POST",
            f"/admin/functions/{segment(name)}/scale",
            json={"instances": instances, "on": list(on), "wait": wait},
        )
    note(f"{name}: {instances} instance{'' if instances == 1 else 's'}" + ("" if wait else " asked for"))


@click.command("warm")
@click.argument("name")
@click.option("--nodes", type=click.IntRange(1, 4096), help="On how many nodes (default: every host).")
@click.option("--on", "on", multiple=True, metavar="NODE", help="On this node (may be repeated).")
@client_options
def warm_command(
    name: str, nodes: int | None, on: tuple[str, ...], url: str | None, api_key: str | None
) -> None:
    """Bring a function's image into host memory, without starting it.

    \b
    Examples:
      hypercast warm tiny-coder --nodes 2
      hypercast warm tiny-coder --on node-1
    """
    with connect(url, api_key) as client:
        follow(client, f"/admin/functions/{segment(name)}/warm", {"nodes": nodes, "on": list(on)})
    note(f"{name} is in host memory")


@click.command("evict")
@click.argument("name")
@click.option(
    "--tier", type=click.Choice(["gpu", "host"]), default="host", help="Which tier to drop it from."
)
@click.option("--on", "on", multiple=True, metavar="NODE", help="On this node (default: all).")
@client_options
def evict_command(name: str, tier: str, on: tuple[str, ...], url: str | None, api_key: str | None) -> None:
    """Drop a function's idle image from a tier. The cluster keeps one host copy.

    Example: hypercast evict tiny-coder --tier gpu
    """
    with connect(url, api_key) as client:
        client.request("POST", f"/admin/functions/{segment(name)}/drop", json={"tier": tier, "on": list(on)})
    note(f"dropped the idle copies of {name} from {tier} memory")
