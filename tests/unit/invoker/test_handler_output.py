"""What a handler prints: line by line, bounded, and without taking the node's time."""

import asyncio
import time
from pathlib import Path

import pytest

from invoker.handlers.log_lines import MAX_LINE_BYTES, MAX_LINES, LineSplitter
from tests.fixtures.handler import call, started
from tests.fixtures.loops import UVLOOP, Backend


@pytest.fixture
def anyio_backend() -> Backend:
    return UVLOOP  # as a node runs on


async def test_output_of_both_streams_is_logged_line_by_line(tmp_path: Path) -> None:
    source = """
import sys
print("loaded")
def handle(request):
    print("out", request)
    print("err", request, file=sys.stderr)
    return 1
"""
    logs: list[str] = []
    async with started(tmp_path, source, logs=logs) as process:
        await call(process, "é")
    assert logs == ["loaded", "out é", "err é"]


def test_log_lines_are_bounded() -> None:
    seen: list[str] = []
    lines = LineSplitter(seen.append)
    lines.feed(b"one\ntw")
    lines.feed(b"o\r\n" + b"x" * (2 * MAX_LINE_BYTES + 5))
    lines.end()
    assert seen[:2] == ["one", "two"]
    assert [len(line) for line in seen[2:]] == [MAX_LINE_BYTES, MAX_LINE_BYTES, 5]


def test_lines_beyond_the_bound_are_counted() -> None:
    now_s = 0.0
    seen: list[str] = []
    lines = LineSplitter(seen.append, lambda: now_s)
    lines.feed(b"a\n" * (MAX_LINES - 1))
    lines.feed(b"b\nc\nd\n")
    assert len(seen) == MAX_LINES and seen[-1] == "b" and lines.dropped == 2
    now_s = 1.0
    lines.feed(b"e\n")
    assert seen[MAX_LINES:] == [f"(2 lines dropped: more than {MAX_LINES} in 1 s)", "e"]
    lines.feed(b"\n" * 10_000)
    lines.end()
    assert len(seen) == 2 * MAX_LINES + 2
    assert seen[-1].startswith(f"({10_001 - MAX_LINES} lines dropped")


class Printed(list[str]):
    """The lines of a log; signals a line that reports dropped lines, once a window."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = asyncio.Event()

    def append(self, line: str) -> None:
        super().append(line)
        if "lines dropped" in line:
            self.cut.set()


async def test_a_handler_that_prints_without_end_leaves_the_node_its_time(tmp_path: Path) -> None:
    source = """
import os, threading
over = threading.Event()
def handle(request):
    if request == "stop":
        over.set()
    while not over.is_set():
        os.write(1, b"\\n" * 65536)
"""
    logs = Printed()
    async with started(tmp_path, source, logs=logs) as process:
        began_s = time.monotonic()
        printing = asyncio.create_task(call(process, "print"))
        await logs.cut.wait()
        logs.cut.clear()
        window_s, used_s = time.monotonic(), time.process_time()
        await logs.cut.wait()
        window_s, used_s = time.monotonic() - window_s, time.process_time() - used_s
        assert await call(process, "stop") == [None]
        await printing
        assert used_s < window_s / 2
        assert len(logs) <= (MAX_LINES + 1) * (2 + time.monotonic() - began_s)
