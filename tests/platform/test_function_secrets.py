"""A function's secrets on a real platform: from the command line to the handler, and nowhere else."""

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from benchmarks.harness.local_platform import run_cli
from invoker.handlers.confine import DEFAULT_SANDBOX
from tests.fixtures.platform import ROOT, Platform

VALUE, NEXT = "first-hunter2-value", "second-hunter2-value"
YAML = "name: keeper\nhandler: handler.py:handle\nsecrets: [TOKEN]\nscaling: {keep_alive: 1h}\n"
HANDLER = """
import hashlib, os
print("token is", os.environ["TOKEN"], flush=True)
def handle(request):
    if request:
        raise ValueError(os.environ["TOKEN"])
    return hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest()
"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    flags = ("--nodes", "1", "--device", "cpu", "--allow-handlers")
    if DEFAULT_SANDBOX.missing():
        flags = (*flags, "--allow-unconfined-handlers")
    made = Platform(data=tmp_path_factory.mktemp("secrets") / "data", flags=flags)
    made.up()
    try:
        yield made
    finally:
        made.down()


def test_a_secret_reaches_the_handler_and_no_disk_or_log(platform: Platform, tmp_path: Path) -> None:
    def digest_of(value: str) -> str:
        return f'"{hashlib.sha256(value.encode()).hexdigest()}"'

    def set_secret(value: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "value"
        file.write_text(f"{value}\n")
        return platform.run("secrets", "set", "keeper", "TOKEN", "--from-file", str(file))

    folder = tmp_path / "keeper"
    folder.mkdir()
    (folder / "function.yaml").write_text(YAML)
    (folder / "handler.py").write_text(HANDLER)
    refused = platform.run("deploy", str(folder), check=False)
    assert refused.returncode == 2 and "hypercast secrets set keeper TOKEN" in refused.stderr
    shown = set_secret(VALUE)
    platform.run("deploy", str(folder))
    answer = platform.run("invoke", "keeper", "-d", "{}").stdout
    assert answer.strip() == digest_of(VALUE)
    failed = platform.run("invoke", "keeper", "-d", '{"fail": true}', check=False)
    assert "ValueError: ***" in failed.stderr
    log = platform.run("logs", "keeper").stdout
    assert "token is ***" in log
    (listed,) = platform.json("secrets", "list", "keeper")
    assert (listed["key"], listed["bytes"]) == ("TOKEN", len(VALUE))

    set_secret(NEXT)
    assert platform.run("invoke", "keeper", "-d", "{}").stdout.strip() == digest_of(VALUE)
    platform.run("scale", "keeper", "--instances", "0")
    platform.until("it has ended", lambda: not platform.instances("keeper"))
    assert platform.run("invoke", "keeper", "-d", "{}").stdout.strip() == digest_of(NEXT)

    texts = [
        shown.stdout,
        shown.stderr,
        failed.stdout,
        failed.stderr,
        log,
        str(platform.get("/admin/functions")),
    ]
    assert not any("hunter2" in text for text in texts)
    files = [path for path in platform.data.rglob("*") if stat.S_ISREG(path.lstat().st_mode)]
    assert any(b"hc:secrets" in path.read_bytes() for path in files)  # Redis's append-only file
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []


def test_a_value_comes_from_standard_input(platform: Platform) -> None:
    for raw, nbytes in ((b"abc\n", 3), (b"abc\r\n", 3), (b"abc", 3)):
        made = subprocess.run(
            [sys.executable, "-m", "cli", "secrets", "set", "other", "PIPED", "-o", "json"],
            input=raw,
            cwd=ROOT,
            env={**os.environ, **platform.env},
            capture_output=True,
            check=True,
        )
        assert f'"bytes": {nbytes}'.encode() in made.stdout
    platform.run("secrets", "delete", "other", "PIPED")
    assert platform.json("secrets", "list", "other") == []
    assert run_cli("secrets", "delete", "other", "PIPED", env=platform.env, timeout_s=60).returncode == 4
    assert platform.json("secrets", "reencrypt") == {"reencrypted": [], "unreadable": []}
