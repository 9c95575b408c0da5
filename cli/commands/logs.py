"""`logs`: the log lines of a function's instances."""

import json

import click

from cli.client import Client, segment
from cli.completion import function_names
from cli.options import client_options, text_option


@click.command("logs")
@click.argument("name", shell_complete=function_names)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(1, 10_000),
    metavar="N",
    default=100,
    show_default=True,
    help="Number of recent lines of each node.",
)
@click.option("-f", "--follow", is_flag=True, help="Print new lines until Ctrl-C.")
@text_option("one object per line, with `node` and `line`")
@client_options
def logs_command(name: str, lines: int, follow: bool, form: str, client: Client) -> None:
    """Print the log of a function from all nodes: starts, phases, errors, a handler's output.

    Nodes keep these lines in memory, and the last MiB in a file, which the next node of the host shows after
    a kill. A line names each node that was killed while it ran the function. With -f the lines of nodes that
    come later are printed, too.

    \b
    Examples:
      hypercast logs echo
      hypercast logs echo -f
    """
    client.set_timeout(86400.0 if follow else 60.0)
    query = {"lines": lines, "follow": str(follow).lower()}
    with client.stream("GET", f"/admin/functions/{segment(name)}/logs", params=query) as response:
        for line in response.iter_lines():
            if form == "json":
                node, _, text = line.partition(" | ")
                line = json.dumps({"node": node, "line": text}, ensure_ascii=False)
            click.echo(line)
