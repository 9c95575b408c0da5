"""The audit log of a running platform, also after its gateway was killed in the middle of a change."""

import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.harness.local_platform import free_port
from tests.fixtures.platform import Platform

METRICS_PORT = free_port()


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    flags = ("--nodes", "1", "--device", "cpu", "--metrics-port", str(METRICS_PORT))
    made = Platform(data=tmp_path_factory.mktemp("audit") / "data", flags=flags)
    made.up()
    try:
        yield made
    finally:
        made.down()


def begin_upload(platform: Platform, digest: str) -> socket.socket:
    """Begin the upload of a blob, the rest of which never comes."""
    url = httpx2.URL(platform.url)
    connection = socket.create_connection((url.host, url.port))
    connection.sendall(
        f"PATCH /admin/blobs/{digest} HTTP/1.1\r\nhost: gw\r\nauthorization: Bearer {platform.key}\r\n"
        "upload-offset: 0\r\nupload-length: 100\r\ncontent-length: 100\r\n\r\nbegin".encode()
    )
    return connection


def test_changes_are_in_the_log_and_in_the_file_of_the_gateway(platform: Platform) -> None:
    platform.run("deploy", "builtin:echo", "--name", "echo")
    made = platform.json("keys", "create", "--tenant", "acme")
    platform.run("scale", "echo", "--instances", "0")
    platform.run("delete", "echo", "--yes", check=False)
    rows = platform.json("audit")
    operations = [row["operation"] for row in rows]
    assert operations[0] == "function.delete" and operations[-1] == "key.create"  # the first admin key
    assert (rows[-1]["key_id"], rows[-1]["gateway"]) == ("", "gateway")
    assert {"function.deploy", "function.scale"} <= set(operations)
    (created,) = platform.json("audit", "--operation", "key.create", "--limit", "1")
    assert (created["target"], created["made"], created["status"]) == ("acme", made["id"], 201)
    assert "key.create" in platform.run("audit", "--since", "1h").stdout
    assert platform.run("audit", "-o", "csv").stdout.startswith("at,operation,target,made,status,")

    file = platform.data / "audit" / "gateway.log"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    of_key = [line for line in lines if line["id"] == created["id"]]
    assert [line["event"] for line in of_key] == ["attempt", "outcome"]
    assert made["key"] not in file.read_text()


def test_a_gateway_that_dies_in_a_change_leaves_its_record(platform: Platform) -> None:
    digest = "ab" * 32
    gateway = platform.process("gateway")
    with begin_upload(platform, digest):
        platform.until("the change is recorded", lambda: opened(platform, digest))
        gateway.kill()
        gateway.wait()
    platform.until("the gateway is back", lambda: opened(platform, digest))
    (left,) = opened(platform, digest)
    assert (left["operation"], left["role"], left["address"]) == ("blob.upload", "admin", "127.0.0.1")
    assert "open" in platform.run("audit", "--operation", "blob.", "--limit", "1").stdout


def opened(platform: Platform, target: str) -> list[dict[str, Any]]:
    """Return the records of a target that have no outcome."""
    with platform.http() as http:
        try:
            rows = http.get("/admin/audit").json()["entries"]
        except httpx2.TransportError:
            return []
    return [row for row in rows if row["target"] == target and row["status"] is None]


def test_callers_change_nothing_and_their_attempts_are_listed_apart(platform: Platform) -> None:
    caller = platform.json("keys", "create", "--tenant", "mallory")
    before = len(platform.json("audit", "--limit", "1000"))
    with httpx2.Client(base_url=platform.url, trust_env=False) as http:
        key = {"authorization": f"Bearer {caller['key']}"}
        for _ in range(50):
            assert http.delete("/admin/functions/echo", headers=key).status_code == 403
        assert http.get("/admin/audit", headers=key).status_code == 403
    assert len(platform.json("audit", "--limit", "1000")) == before
    (row,) = platform.json("audit", "--refused", "--key", caller["id"])
    assert (row["operation"], row["tenant"], row["status"]) == ("function.delete", "mallory", 403)


def test_metrics_are_on_their_own_port(platform: Platform) -> None:
    with httpx2.Client(trust_env=False) as http:
        apart = http.get(f"http://127.0.0.1:{METRICS_PORT}/metrics")
        assert 'hypercast_refused_changes_total{status="403"}' in apart.text
        assert http.get(f"{platform.url}/metrics").status_code == 401
        assert set(http.get(f"{platform.url}/health").json()) == {"status", "state"}


def test_the_records_of_a_restarted_platform_are_there(platform: Platform, tmp_path: Path) -> None:
    before = platform.json("audit", "--limit", "1000")
    platform.down()
    platform.up()
    after = platform.json("audit", "--limit", "1000")
    assert after == before
