"""Scratch folders of handlers."""

import subprocess
import sys
from pathlib import Path

from invoker.scratch import scratch_folder


def test_scratch_folders_of_killed_nodes_are_swept(tmp_path: Path) -> None:
    parent = tmp_path / "scratch"
    code = (
        "import sys, pathlib; from invoker.scratch import scratch_folder\n"
        "with scratch_folder(pathlib.Path(sys.argv[1])) as f:\n"
        " (f / 'handler').mkdir(); print(f, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        with scratch_folder(parent) as mine:
            assert (theirs / "handler").exists() and mine != theirs
        assert theirs.exists()
        process.kill()
        process.wait()
    with scratch_folder(parent) as mine:
        assert list(parent.iterdir()) == [mine]
    assert not parent.exists()
