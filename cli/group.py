"""The `hypercast` command's parts: one file a command, loaded when it is called."""

import importlib
import os
import sys

import click

from cli.errors import CliError
from cli.interrupts import INTERRUPTED, SAID, leaving_at_once
from registry.errors import RegistryError

# name: (module, help). A module has a click command of the same name (dashes as underscores).
COMMANDS = {
    "up": ("cli.up", "Start Redis, a gateway and nodes on this machine."),
    "down": ("cli.down", "Stop what `up` started."),
    "gateway": ("cli.processes", "Run one gateway process."),
    "invoker": ("cli.processes", "Run one node's invoker process."),
    "deploy": ("cli.deploy", "Register a model or a handler as a function."),
    "list": ("cli.functions", "List functions."),
    "describe": ("cli.functions", "Show one function, its versions and instances."),
    "rollback": ("cli.functions", "Make an earlier version current."),
    "delete": ("cli.functions", "Delete a function."),
    "invoke": ("cli.invoke", "Call a function."),
    "warm": ("cli.scaling", "Bring a function's image into host memory."),
    "scale": ("cli.scaling", "Set a function's number of instances now."),
    "evict": ("cli.scaling", "Drop a function's idle image from a tier."),
    "logs": ("cli.logs", "Show a function's log lines."),
    "nodes": ("cli.nodes", "List nodes and what they hold."),
    "casts": ("cli.casts", "Show images on their way to nodes, and how each node gets on."),
    "usage": ("cli.usage", "Usage and cost."),
    "gpu-time": ("cli.gpu_time", "What accelerators did with their time."),
    "prices": ("cli.prices", "Show and set prices."),
    "keys": ("cli.keys", "Make, list, limit and revoke API keys."),
    "plan": ("cli.plan", "Show how a model would be given to many nodes, step by step."),
    "pack": ("cli.pack", "Pack a checkpoint into a model image, without deploying it."),
    "doctor": ("cli.doctor", "Check this machine and say how to mend what is missing."),
    "completion": ("cli.completion", "Print a shell's completion script."),
}

EPILOG = """\b
Examples:
  hypercast up --detach --data-dir ./data
  export HYPERCAST_API_KEY=$(cat ./data/admin.key)
  hypercast deploy ./my-model --name my-model
  hypercast invoke my-model -p 'def fib(n):' --stream
  hypercast usage report

Exit codes: 0 ok, 1 other, 2 usage, 3 auth, 4 not found, 5 deploy failed, 6 timed out.
"""


class Lazy(click.Group):
    """A group whose commands are imported when they are needed, so that `--help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        with leaving_at_once():
            module = importlib.import_module(COMMANDS[name][0])
        command = getattr(module, name.replace("-", "_") + "_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=Lazy, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hypercast", prog_name="hypercast")
def cli() -> None:
    """Hypercast: a serverless function platform for machine-learning models."""


def main() -> None:
    """Run the command: every failure is one clear line on stderr and an exit code."""
    try:
        code = cli.main(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.stderr.write(SAID)
        sys.exit(INTERRUPTED)
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except (CliError, RegistryError) as exc:
        sys.stderr.write(f"hypercast: {exc}\n")
        sys.exit(exc.exit_code if isinstance(exc, CliError) else 1)
    except BrokenPipeError:
        # Nobody reads any more, as in `hypercast … | head`; keep the interpreter from saying so at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as exc:
        sys.stderr.write(
            f"hypercast: {exc.filename}: {exc.strerror}\n" if exc.filename else f"hypercast: {exc}\n"
        )
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
