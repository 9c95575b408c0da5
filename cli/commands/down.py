"""`down`: stop a platform that `up` started."""

import signal
from pathlib import Path

import click
import psutil

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
    process.send_signal(signal.SIGTERM)
    try:
        with waiting("stopping: requests in flight may finish"):
            process.wait(timeout)
    except psutil.TimeoutExpired as exc:
        raise TimeoutExceeded(
            f"process {process.pid} is still running after {timeout:g} s; see {data_dir / 'logs'}"
        ) from exc
    if form in ("json", "csv"):
        emit_record({"data_dir": str(data_dir), "pid": process.pid, "stopped": True}, form)
    note("stopped")
