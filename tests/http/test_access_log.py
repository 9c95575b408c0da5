"""The access log: a line a request, whatever its path holds and whatever becomes of what it is written to."""

import asyncio
import errno
import io
import logging
from contextlib import redirect_stderr

import pytest

from gateway.http.access_log import AccessEntry, AccessLog
from tests.fixtures.gateway_http import gateway

ENTRY = AccessEntry(
    request_id="req-1", method="GET", path="/v1/models", status=200, duration_ms=1.25, key="k"
)


class Lines(io.StringIO):
    """A stderr with an event for each write."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


class Full(io.StringIO):
    """A stderr on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_path_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with gateway() as gw, gw.http("none") as http:
            with redirect_stderr(Lines()) as lines:
                await http.get("/v1/%0A2026-11-21 INFO forged%E2%80%A8" + "x" * 1000)
                await lines.written.wait()
            (line,) = lines.getvalue().splitlines()
            assert " GET /v1/%0A2026-11-21%20INFO%20forged%E2%80%A8xxx" in line and " 401 " in line
            assert len(line) < 500

    caplog.set_level(logging.INFO, logger="hypercast.access")
    asyncio.run(main())


async def test_a_log_that_cannot_be_written_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hypercast.access")
    log = AccessLog()
    with redirect_stderr(Full()):
        for _ in range(600):
            log.add(ENTRY)
        log.flush()
    with redirect_stderr(Lines()) as lines:
        log.add(ENTRY)
        log.flush()
    assert len(lines.getvalue().splitlines()) == 1
