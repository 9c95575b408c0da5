"""`down`: stop a platform that `up` started."""

import contextlib
import os
import select
import signal
from pathlib import Path

import click

from cli.errors import MissingError, TimeoutExceeded
from cli.options import SECONDS, data_dir_option, output_option
from cli.output import emit_record
from cli.progress import note, waiting
from cli.supervise import run_file


@click.command("down")
@data_dir_option
@click.option("--timeout", type=SECONDS, default=60.0, show_default=True, help="Seconds to wait.")
@output_option
def down_command(data_dir: Path, timeout: float, form: str) -> None:
    """Stop the gateways, the nodes and Redis. Functions, keys, images and usage are kept for the next `up`.

    \b
    Examples:
      hypercast down
      hypercast down --data-dir ./data
    """
    run = run_file.read(data_dir.expanduser().resolve())
    process = run.process() if run else None
    if process is None:
        raise MissingError(f"no platform is running from {data_dir}")
    with waiting("stopping: requests in flight may finish"):
        ended = stop(process.pid, timeout)
    if not ended:
        raise TimeoutExceeded(
            f"process {process.pid} is still running after {timeout:g} s; see {data_dir / 'logs'}"
        )
    if form in ("json", "csv"):
        emit_record({"data_dir": str(data_dir), "pid": process.pid, "stopped": True}, form)
    note("stopped")


def stop(pid: int, timeout_s: float) -> bool:
    """Send a process SIGTERM; return whether it ends in time, be it reaped then or not.

    In a container, the first process may never reap those that it adopts.
    """
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            return bool(select.select([fd], [], [], timeout_s)[0])
        finally:
            os.close(fd)
    return True
