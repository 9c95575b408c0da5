"""The `hypercast` command and its subcommands, each imported when it is used."""

import importlib
import os
import sys

import click

from cli.errors import CliError
from cli.interrupts import INTERRUPTED, MESSAGE, leaving_at_once
from registry.errors import RegistryError

# name: (module, help). The module has a click command `NAME_command` (dashes as underscores).
COMMANDS = {
    "up": ("cli.commands.up", "Start a platform on this machine: Redis, gateways and nodes."),
    "down": ("cli.commands.down", "Stop a platform that `up` started."),
    "dev": ("cli.commands.dev", "Serve a folder on this machine, and deploy it again when it changes."),
    "gateway": ("cli.commands.processes", "Run one gateway process."),
    "invoker": ("cli.commands.processes", "Run one node (invoker) process."),
    "login": ("cli.commands.login", "Keep a gateway's address and a key for it."),
    "context": ("cli.commands.context", "Choose between gateways."),
    "deploy": ("cli.commands.deploy", "Deploy a model or a handler as a function."),
    "examples": ("cli.commands.examples", "List the example functions that can be deployed."),
    "status": ("cli.commands.status", "Show the platform on one screen."),
    "top": ("cli.commands.top", "Show nodes, functions and casts live."),
    "list": ("cli.commands.functions", "List functions."),
    "describe": ("cli.commands.functions", "Show the settings, versions and instances of a function."),
    "rollback": ("cli.commands.functions", "Make an earlier version current."),
    "rollout": ("cli.commands.rollout", "Send a share of a function's requests to another version."),
    "set": ("cli.commands.set_function", "Change settings of a function, without a new version."),
    "share": ("cli.commands.share", "Change which tenants may call a function."),
    "delete": ("cli.commands.functions", "Delete a function with all its versions."),
    "invoke": ("cli.commands.invoke", "Call a function and print its response."),
    "predict": ("cli.commands.predict", "Queue a call of a function, which runs in the background."),
    "batch": ("cli.commands.batch", "Run a file of calls in the background."),
    "jobs": ("cli.commands.jobs", "List, show, wait for and cancel predictions and batches."),
    "warm": ("cli.commands.scaling", "Load a function's image into host memory."),
    "pull": ("cli.commands.pull", "Make a folder on a node's machine that any engine can load."),
    "scale": ("cli.commands.scaling", "Set a function's current number of instances."),
    "evict": ("cli.commands.scaling", "Drop a function's idle image from GPU or host memory."),
    "logs": ("cli.commands.logs", "Print the log of a function."),
    "nodes": ("cli.commands.nodes", "List nodes with their memory and instances."),
    "cordon": ("cli.commands.nodes", "Start no further instances on a node."),
    "uncordon": ("cli.commands.nodes", "Allow starts on a node again."),
    "drain": ("cli.commands.nodes", "Move what runs on a node to others."),
    "casts": ("cli.commands.casts", "Show model transfers between nodes and their progress."),
    "usage": ("cli.commands.usage", "Show use and cost."),
    "gpu-time": ("cli.commands.gpu_time", "Show GPU time: used, loading, idle."),
    "prices": ("cli.commands.prices", "Show and set prices."),
    "keys": ("cli.commands.keys", "Create, list, limit, rotate and revoke API keys."),
    "secrets": ("cli.commands.secrets", "Set, list and delete secrets of functions."),
    "audit": ("cli.commands.audit", "Show who changed what."),
    "secret": ("cli.commands.secret", "Rotate the secret of the cluster."),
    "plan": ("cli.commands.plan", "Plan a transfer of a model to many nodes, step by step."),
    "pack": ("cli.commands.pack", "Pack a checkpoint into a folder that `deploy` accepts."),
    "doctor": ("cli.commands.doctor", "Check this machine and suggest fixes."),
    "completion": ("cli.commands.completion", "Print the completion script for a shell."),
}

EPILOG = """\b
Examples:
  hypercast up --detach --data-dir ./data
  export HYPERCAST_API_KEY=$(cat ./data/admin.key)
  hypercast deploy ./my-model --name my-model
  hypercast invoke my-model -p 'def fib(n):' --stream
  hypercast usage report

Exit codes: 0 ok, 1 any other error, 2 usage, 3 auth, 4 not found, 5 deploy failed,
6 timed out.
"""


class LazyGroup(click.Group):
    """A group that imports a command when it is used, so that `--help` is quick."""

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


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hypercast", prog_name="hypercast")
def cli() -> None:
    """Deploy and serve machine-learning models on the Hypercast serverless platform."""


def main() -> None:
    """Run the command; every failure is one line on stderr and an exit code."""
    try:
        code = cli.main(prog_name="hypercast", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        sys.stderr.write(MESSAGE)
        sys.exit(INTERRUPTED)
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except (CliError, RegistryError) as exc:
        sys.stderr.write(f"hypercast: {exc}\n")
        sys.exit(exc.exit_code if isinstance(exc, CliError) else 1)
    except BrokenPipeError:
        # The reader has left, as in `hypercast … | head`: keep the interpreter from reporting it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as exc:
        sys.stderr.write(
            f"hypercast: {exc.filename}: {exc.strerror}\n" if exc.filename else f"hypercast: {exc}\n"
        )
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
