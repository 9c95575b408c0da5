"""The file of the audit log is private, and rotated by size without losing a line."""

import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.core.audit_writer import AuditWriter
from gateway.http.audit_file import write_audit_lines
from registry.clock import FakeClock
from registry.errors import InvalidRecord
from registry.memory.state import MemoryState


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger = logging.getLogger("hypercast.audit")
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.propagate = [], True


async def test_lines_go_to_private_files_of_a_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "audit" / "g.log"
    mask = os.umask(0)
    try:
        write_audit_lines(path, max_bytes=2000)
        writer = AuditWriter(MemoryState(), FakeClock(), "g")
        for number in range(20):
            await writer.end(await writer.begin_own("key.create", f"t{number}"), 201, made="k")
    finally:
        os.umask(mask)
    files = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) > 2 and all(file.stat().st_size <= 2000 for file in files)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [line["event"] for line in lines].count("outcome") == 20
    assert {line["target"] for line in lines if line["event"] == "attempt"} == {f"t{n}" for n in range(20)}


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("")
    with pytest.raises(InvalidRecord, match=r"the audit log .*g\.log: "):
        write_audit_lines(tmp_path / "audit" / "g.log")


async def test_without_a_file_the_lines_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    write_audit_lines(None)
    await AuditWriter(MemoryState(), FakeClock(), "g").begin_own("usage.archive")
    assert '"operation":"usage.archive"' in caplog.text
