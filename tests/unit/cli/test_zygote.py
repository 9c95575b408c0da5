"""What becomes of the zygote's children before they are nodes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

TOLD_AT_ONCE = """
import os, signal, sys
from cli.supervise.zygote import main

def fork():
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)  # as the zygote does when it has to stop at once
    return pid

sys.exit(main("invoker", fork))
"""


def test_a_node_that_is_told_to_end_while_it_is_forked_ends(tmp_path: Path) -> None:
    order = {"id": "n0", "argv": ["--help"], "log": str(tmp_path / "n0.log")}
    zygote = subprocess.Popen(
        [sys.executable, "-c", TOLD_AT_ONCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    said, _ = zygote.communicate(json.dumps({"spawn": order}).encode() + b"\n", timeout=300)
    events = [json.loads(line) for line in said.splitlines()]
    assert [event.get("signal") for event in events if "exited" in event] == [signal.SIGTERM], events
    assert (tmp_path / "n0.log").read_text() == "", "it ran on"
    assert zygote.returncode == 0
