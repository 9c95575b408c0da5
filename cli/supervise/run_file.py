"""`up.json` in the data directory: the platform that is running from it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A running platform. `created` is the process's creation time, as its pid may be reused.

    `urls` are the addresses of all gateways, `url` is the first.
    """

    pid: int
    created: float
    url: str
    nodes: int
    urls: Sequence[str] = ()

    def process(self) -> psutil.Process | None:
        """Return the supervisor, None if it has ended."""
        try:
            process = psutil.Process(self.pid)
            ended = process.status() == psutil.STATUS_ZOMBIE  # its parent never reaps it
            return None if ended or abs(process.create_time() - self.created) >= 1.0 else process
        except psutil.NoSuchProcess:
            return None


def path_in(data_dir: Path) -> Path:
    """Return the path of the file in a data directory."""
    return data_dir / "up.json"


def read(data_dir: Path) -> RunFile | None:
    """Return the platform of a data directory, None if no file says so."""
    try:
        return RunFile(**json.loads(path_in(data_dir).read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def write(data_dir: Path, urls: Sequence[str], nodes: int) -> None:
    """Write the file for this process."""
    me = psutil.Process()
    run = RunFile(pid=me.pid, created=me.create_time(), url=urls[0], urls=urls, nodes=nodes)
    temporary = path_in(data_dir).with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(run)) + "\n")
    temporary.replace(path_in(data_dir))
