"""`pull`: a folder with a function's model that other engines can load."""

import click

from cli.client import Client, segment
from cli.commands.scaling import follow
from cli.completion import function_names, node_names
from cli.errors import CliError
from cli.options import client_options, output_option
from cli.output import emit_record
from cli.progress import note


@click.command("pull")
@click.argument("name", shell_complete=function_names)
@click.option(
    "--on",
    metavar="NODE",
    shell_complete=node_names,
    help="On this node's machine.  [default: one that has the image]",
)
@output_option
@client_options
def pull_command(name: str, on: str | None, form: str, client: Client) -> None:
    """Bring a function's model into a host's memory, and print a folder that any engine can be pointed at.

    The folder has config.json, the tokenizer's files and model.safetensors, which is the image in shared
    memory: nothing is copied. The image stays there until `hypercast evict NAME`.

    \b
    Examples:
      hypercast pull tiny-coder
      vllm serve "$(hypercast pull tiny-coder --on node-1)"
    """
    found = follow(client, f"/admin/functions/{segment(name)}/pull", {"on": on})
    if "folder" not in found:
        raise CliError("the gateway's response ended before it named a folder")
    if form in ("json", "csv"):
        emit_record(
            {"name": name, **{key: found[key] for key in ("version", "node", "host", "folder")}}, form
        )
    else:
        click.echo(found["folder"])
    note(f"{name}:{found['version']} is in the memory of host {found['host']} (node {found['node']})")
