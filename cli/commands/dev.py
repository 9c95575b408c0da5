"""`dev`: serve a folder on this machine, and deploy it again when it changes."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import click
import watchfiles

from cli.errors import CliError, UsageError
from cli.examples import example_folder
from cli.interpreter import module_command
from cli.options import NAME
from cli.progress import note
from cli.upload.bundle import read_spec
from registry.config.option_types import PORT

END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlatform:
    """The platform of one `dev`: the environment of commands for it."""

    url: str
    environment: Mapping[str, str]


@click.command("dev")
@click.argument("path")
@click.option("--name", type=NAME, help="Name of the function.  [default: as of `deploy`]")
@click.option("--model", metavar="PATH", help="Checkpoint for a function.yaml that names none.")
@click.option("--port", type=PORT, default=8000, show_default=True, help="Port of the gateway (0: any).")
@click.option("--device", default="auto", show_default=True, help="As of `hypercast up`.")
@click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Directory for state.  [default: a temporary one]"
)
def dev_command(
    path: str, name: str | None, model: str | None, port: int, device: str, data_dir: Path | None
) -> None:
    """Serve a checkpoint or a handler on this machine, and deploy it again when its files change.

    Starts a platform with one node, which may run handlers, keeps one instance running, and prints the
    function's log. A version that cannot be deployed leaves the one before. Ctrl-C stops it all.

    \b
    Examples:
      hypercast dev ./my-function
      hypercast dev ./my-llama --port 8080
      hypercast dev example:echo
    """
    folder = Path(example_folder(path)).expanduser()
    if not folder.is_dir():
        raise UsageError(f"{path} is not a folder")
    watched = watched_folders(folder, model)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        kept = data_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hypercast-dev-")))
        platform = stack.enter_context(running(kept, port, device))
        deploy = ["deploy", str(folder), "--force", "--min-instances", "1"]
        deploy += [*(("--name", name) if name else ()), *(("--model", model) if model else ())]
        function = deployed(platform, deploy)
        if function is None:
            raise CliError(f"{path} cannot be deployed")
        stack.enter_context(log_of(platform, function))
        note(f"serving {function} at {platform.url}; watching {', '.join(map(str, watched))}")
        with suppress(KeyboardInterrupt):
            for _ in watchfiles.watch(*watched, raise_interrupt=True):
                began = time.monotonic()
                if deployed(platform, deploy) is not None:
                    note(f"deployed again in {time.monotonic() - began:.1f}s")


def watched_folders(folder: Path, model: str | None) -> list[Path]:
    """Return the folder, and that of its checkpoint if it is another one. Raises UsageError."""
    spec = read_spec(str(folder))
    checkpoint = Path(model).expanduser() if model else spec.model_folder(folder) if spec else None
    found = [folder.resolve()]
    if checkpoint is not None and checkpoint.is_dir() and not checkpoint.resolve().is_relative_to(found[0]):
        found.append(checkpoint.resolve())
    return found


@contextmanager
def running(data_dir: Path, port: int, device: str) -> Iterator[LocalPlatform]:
    """Start a platform with one node, and stop it at the end. Raises CliError."""
    data = ("--data-dir", str(data_dir))
    up = ("up", "--nodes", "1", "--device", device, "--port", str(port), "--allow-handlers", "--detach")
    started = start([*module_command("cli"), *up, *data, "-o", "json"])
    try:
        key = Path(started["admin_key_file"]).read_text().strip()
        given = {name: value for name, value in os.environ.items() if not name.startswith("HYPERCAST_")}
        there = {"HYPERCAST_URL": started["url"], "HYPERCAST_API_KEY": key}
        yield LocalPlatform(url=started["url"], environment=given | there)
    finally:
        # In a session of its own: a second Ctrl-C must not leave the platform running.
        down = [*module_command("cli"), "down", *data]
        subprocess.run(down, start_new_session=True, stderr=subprocess.DEVNULL, check=False)


def start(command: Sequence[str]) -> dict[str, str]:
    """Run `up`; return what it prints. Interrupted, it stops what it has started. Raises CliError."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if process.returncode:
        raise CliError("the platform did not start")
    found: dict[str, str] = json.loads(printed)
    return found


def deployed(platform: LocalPlatform, deploy: Sequence[str]) -> str | None:
    """Deploy; return the function's name, None if it failed, of which the reason is on stderr."""
    done = subprocess.run(
        [*module_command("cli"), *deploy, "-o", "json"],
        env=platform.environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return str(json.loads(done.stdout)["name"]) if done.returncode == 0 else None


@contextmanager
def log_of(platform: LocalPlatform, function: str) -> Iterator[None]:
    """Print the log of a function until the end."""
    process = subprocess.Popen([*module_command("cli"), "logs", function, "-f"], env=platform.environment)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
