"""Ctrl-C before a command has started: one line and 130, whatever is being imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from cli.interrupts import leaving_at_once
from tests.fixtures.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


def test_an_interrupt_while_the_command_loads_is_one_line(tmp_path: Path) -> None:
    # What is imported first takes as long as the test wants.
    (tmp_path / "click.py").write_text("import sys\nprint('loading', flush=True)\nsys.stdin.read()\n")
    with subprocess.Popen(
        [sys.executable, "-m", "cli", "list"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, said) == (130, "interrupted\n")


def test_only_pythons_own_handler_is_replaced_and_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        for own in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(signal.SIGINT, own)
            with leaving_at_once():
                inside = signal.getsignal(signal.SIGINT)
            assert (inside is own) == (own is signal.SIG_IGN)
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
