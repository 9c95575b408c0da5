"""`up.json` in the data directory: who runs there, so that `down` and a second `up` know."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """`created` is the process's creation time: a pid alone may have been given to another program."""

    pid: int
    created: float
    url: str
    nodes: int

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


def write(data_dir: Path, url: str, nodes: int) -> None:
    me = psutil.Process()
    run = RunFile(pid=me.pid, created=me.create_time(), url=url, nodes=nodes)
    temporary = path_in(data_dir).with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(run)) + "\n")
    temporary.replace(path_in(data_dir))
