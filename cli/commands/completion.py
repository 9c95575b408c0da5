"""`completion`: completion scripts of shells."""

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the completion script for a shell.

    \b
    Examples:
      eval "$(hypercast completion bash)"
      hypercast completion fish > ~/.config/fish/completions/hypercast.fish
    """
    root = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(root, {}, "hypercast", "_HYPERCAST_COMPLETE").source())
