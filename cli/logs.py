"""`logs`: what a function's instances said."""

import click

from cli.client import segment
from cli.options import client_options, connect


@click.command("logs")
@click.argument("name")
@click.option("-n", "--lines", type=click.IntRange(1, 10_000), default=100, show_default=True)
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C.")
@client_options
def logs_command(name: str, lines: int, follow: bool, url: str | None, api_key: str | None) -> None:
    """Show a function's log lines from all nodes: starts, phases, errors, a handler's output.

    Example: hypercast logs echo -f
    """
    with connect(url, api_key, timeout_s=86400.0 if follow else 60.0) as client:
        query = {"lines": lines, "follow": str(follow).lower()}
        with client.stream("GET", f"/admin/functions/{segment(name)}/logs", params=query) as response:
            for line in response.iter_lines():
                click.echo(line)
