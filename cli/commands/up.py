"""`up`: Redis, gateways and nodes on this machine."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from cli.errors import CliError, UsageError
from cli.interpreter import module_command
from cli.options import output_option
from cli.output import emit_record
from cli.progress import note
from cli.supervise import run_file
from cli.supervise.announce import announce
from cli.supervise.logtail import tail
from cli.supervise.settings import UpSettings, count_gpus, settle
from cli.supervise.supervisor import READY, Supervisor
from registry.config.command_line import options_of
from registry.config.option_types import PlatformCommand
from registry.config.options import Options
from registry.config.secrets import make_private
from registry.logs.lines import configure_logs


@click.command("up")
@options_of(PlatformCommand.UP)
@click.option("--detach", is_flag=True, help="Run in the background; return when ready.")
@click.option("--ready-fd", type=int, hidden=True)
@output_option
def up_command(options: Options, detach: bool, ready_fd: int | None, form: str) -> None:
    """Start a platform on this machine: Redis, gateways and nodes, restarted when they die.

    \b
    Examples:
      hypercast up
      hypercast up --nodes 3 --hosts 3 --data-dir ./data --detach
      hypercast up --nodes 8 --device emulated:h800/1000/10
    """
    if options.log_format == "json":
        configure_logs("warning", "json", "supervisor")
    settings = settle(options, gpus=count_gpus(), cores=len(os.sched_getaffinity(0)))
    os.umask(0o077)
    prepare_data_dir(settings.data_dir)
    refuse_second(settings)
    if detach:
        start_detached(settings)
        if form in ("json", "csv"):
            emit_record(running(settings), form)
    else:
        asyncio.run(Supervisor(settings, ready_fd).run())


def running(settings: UpSettings) -> dict[str, Any]:
    """Return the fields of a platform that runs in the background."""
    run = run_file.read(settings.data_dir)
    assert run is not None
    return {
        "url": run.url,
        "urls": list(run.urls),
        "pid": run.pid,
        "nodes": run.nodes,
        "data_dir": str(settings.data_dir),
        "admin_key_file": str(settings.data_dir / "admin.key"),
    }


def prepare_data_dir(data_dir: Path) -> None:
    """Create the data directory and check that it is writable. Raises CliError."""
    try:
        make_private(data_dir)
        (data_dir / "logs").mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=data_dir):
            pass
    except OSError as exc:
        raise CliError(f"cannot write to --data-dir {data_dir}: {exc.strerror}") from exc


def refuse_second(settings: UpSettings) -> None:
    """Raise CliError if a platform is running from the data directory."""
    run = run_file.read(settings.data_dir)
    if run and run.process():
        raise CliError(f"already running at {run.url} from {settings.data_dir} (pid {run.pid})")


def start_detached(settings: UpSettings) -> None:
    """Run `up` again in a session of its own, and show the steps of its start until all is ready."""
    path = settings.data_dir / "logs" / "up.log"
    earlier_bytes = path.stat().st_size if path.exists() else 0
    reader, writer = os.pipe()
    with path.open("ab") as log:
        process = subprocess.Popen(
            [*module_command("cli"), *without_detach(sys.argv[1:]), "--ready-fd", str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(writer,),
        )
    os.close(writer)
    try:
        ready = False
        with os.fdopen(reader) as pipe:
            for line in pipe:
                ready = line.strip() == READY
                if ready:
                    break
                note(line.rstrip())
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    if not ready:
        code = process.wait()
        reason = tail(path, start=earlier_bytes).strip()
        if "\n" in reason or not reason.startswith("hypercast: "):
            reason = f"the platform did not start:\n  {reason}"
        failure = UsageError if code == UsageError.exit_code else CliError
        raise failure(reason.removeprefix("hypercast: "))
    run = run_file.read(settings.data_dir)
    assert run is not None
    announce(settings, run.urls)


def without_detach(arguments: list[str]) -> list[str]:
    """Return the arguments for a start in the foreground."""
    return [argument for argument in arguments if argument != "--detach"]
