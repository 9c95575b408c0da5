"""`up.json` in the data directory: who runs there, so that `down` and a second `up` know."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """`created` is the process's creation time: a pid alone may have been given to another program.

    `urls` are the addresses of all gateways, `url` is the first.
    """

    pid: int
    created: float
    url: str
    nodes: int
    urls: Sequence[str] = ()

    def process(self) -> psutil.Process | None:
        """The supervisor, if it still runs."""
        try:
            process = psutil.Process(self.pid)
            ended = process.status() == psutil.STATUS_ZOMBIE  # waits for a parent that never asks
            return None if ended or abs(process.create_time() - self.created) >= 1.0 else process
        except psutil.NoSuchProcess:
            return None


def path_in(data_dir: Path) -> Path:
    return data_dir / "up.json"


def read(data_dir: Path) -> RunFile | None:
    try:
        return RunFile(**json.loads(path_in(data_dir).read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None


def write(data_dir: Path, urls: Sequence[str], nodes: int) -> None:
    me = psutil.Process()
    run = RunFile(pid=me.pid, created=me.create_time(), url=urls[0], urls=urls, nodes=nodes)
    temporary = path_in(data_dir).with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(run)) + "\n")
    temporary.replace(path_in(data_dir))
