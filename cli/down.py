"""`down`: stop what `up` started."""

import signal
from pathlib import Path

import click
import psutil

from cli import run_file
from cli.errors import MissingError, TimeoutExceeded
from cli.options import SECONDS
from cli.progress import note
from cli.up_settings import default_data_dir


@click.command("down")
@click.option(
    "--data-dir", type=click.Path(path_type=Path), default=default_data_dir, help="As given to `up`."
)
@click.option("--timeout", type=SECONDS, default=60.0, show_default=True, help="Seconds to wait.")
def down_command(data_dir: Path, timeout: float) -> None:
    """Stop Redis, gateway and nodes. Functions, keys, images and bills are there again after `up`.

    Example: hypercast down --data-dir ./data
    """
    run = run_file.read(data_dir.expanduser().resolve())
    process = run.process() if run else None
    if process is None:
        raise MissingError(f"nothing runs from {data_dir}")
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout)
    except psutil.TimeoutExpired as exc:
        raise TimeoutExceeded(
            f"process {process.pid} has not ended after {timeout:g} s; see {data_dir / 'logs'}"
        ) from exc
    note("stopped")
