"""`hypercast dev`: a handler is served, deployed again when it changes, and all ends with Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks.harness.processes import ROOT
from tests.fixtures.patience import PATIENCE_S, until_seen

HANDLER = "def handle(request):\n    return {answer!r}\n"


def test_a_handler_is_deployed_again_when_it_changes(tmp_path: Path) -> None:
    folder, data = tmp_path / "answers", tmp_path / "data"
    folder.mkdir()
    (folder / "function.yaml").write_text("name: answers\nhandler: handler.py:handle\n")
    (folder / "handler.py").write_text(HANDLER.format(answer="one"))
    log = tmp_path / "dev.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "dev", str(folder), "--port", "0", "--data-dir", str(data)],
            cwd=ROOT,
            env={**os.environ, "HYPERCAST_URL": "http://127.0.0.1:9"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )

    def shown() -> str:
        return log.read_text()

    try:
        found = until_seen(
            "it serves", lambda: re.search(r"serving answers at (\S+); watching", shown()), 240.0, shown
        )
        url, key = found[1], (data / "admin.key").read_text().strip()
        with httpx2.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S, trust_env=False
        ) as http:

            def answer() -> Any:
                return http.post("/functions/answers/invoke", json={}).json()

            assert answer() == "one"
            (folder / "handler.py").write_text(HANDLER.format(answer="two"))
            until_seen("the change is served", lambda: answer() == "two", PATIENCE_S, shown)
            (folder / "function.yaml").write_text("name: answers\nhandler: nothing.py:handle\n")
            until_seen("a wrong one is reported", lambda: "nothing.py" in shown(), PATIENCE_S, shown)
            assert answer() == "two" and process.poll() is None
        platform = psutil.Process(json.loads((data / "up.json").read_text())["pid"])
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(PATIENCE_S)
    assert status == 0, shown()
    assert not platform.is_running() or platform.status() == psutil.STATUS_ZOMBIE
    assert "Traceback" not in shown()
