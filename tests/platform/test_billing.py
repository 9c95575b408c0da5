"""What a running platform bills: streams like whole answers, clients that leave, and sums that agree."""

import contextlib
import itertools
import json
import math
import re
import socket
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.platform import ROOT, Platform

MODEL = "billed"
TOKENS, ENOUGH, PAIRS = 64, 8, 40
ANSWER_BYTES = 1 << 20  # more than any
LONG, STUCK = 900, 6
ASKED: set[str] = set()  # request ids of this file


@pytest.fixture(scope="module")
def billed(platform: Platform, root: Path) -> Iterator[str]:
    platform.run("deploy", str(root / "functions" / "tiny-coder"), "--name", MODEL)
    yield MODEL
    platform.run("delete", MODEL, "--yes")


def record(platform: Platform, request_id: str) -> dict[str, Any]:
    def show() -> dict[str, Any] | None:
        with platform.http() as http:
            response = http.get(f"/admin/usage/show/{request_id}")
            return response.json() if response.status_code == 200 else None

    found: dict[str, Any] = platform.until(f"the record of {request_id} is there", show)
    return found


def ask(platform: Platform, request_id: str, *, stream: bool) -> dict[str, Any]:
    """Return the bill of 64 greedy tokens, whole or streamed to the end."""
    options: dict[str, Any] = {"prompt": "def add(a, b):", "max_tokens": TOKENS, "stream": stream}
    with open_call(platform, request_id, **options) as client:
        # Woken at the end alone: a client that took each event as it came would take time from the node's
        # processor, which one on a machine of its own does not.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, ANSWER_BYTES)
        answer = b"".join(iter(lambda: client.recv(ANSWER_BYTES), b""))
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    return record(platform, request_id)


def refuted(ratios: Sequence[float], within: float) -> bool:
    """Return whether the median ratio is outside the bound around 1 with 99 % confidence.

    Half of the pairs lie on either side of the true median, however wide noise spreads them.
    """
    ordered, margin = sorted(ratios), math.ceil(1.3 * math.sqrt(len(ratios)))
    low, high = ordered[len(ratios) // 2 - margin], ordered[(len(ratios) - 1) // 2 + margin]
    return low > 1 + within or high < 1 - within


def test_a_stream_costs_what_a_whole_answer_does(platform: Platform, billed: str) -> None:
    ratios: list[float] = []
    ask(platform, "wake", stream=False)
    for pair in range(PAIRS):
        spent_us: dict[bool, int] = {}
        for stream in (pair % 2 == 0, pair % 2 == 1):
            bill = ask(platform, f"s-{pair}-{stream}", stream=stream)
            assert (bill["status"], bill["completion_tokens"]) == ("ok", TOKENS)
            spent_us[stream] = sum(part["gpu_us"] for part in bill["gpu"])
            assert bill["billed_gpu_ms"] == -(-spent_us[stream] // 1000)
        ratios.append(spent_us[True] / spent_us[False])
        # All pairs so far, so that a longer run is a better measurement and no second try.
        if len(ratios) >= ENOUGH and abs(statistics.median(ratios) - 1) <= 0.05:
            return
    assert not refuted(ratios, 0.05), f"streams cost so many times what whole answers do: {sorted(ratios)}"


def test_a_client_that_leaves_at_token_three_is_billed_for_what_had_come(
    platform: Platform, billed: str
) -> None:
    bills, more = [], []
    for number in range(5):
        had = leave(platform, f"leaves-{number}", events=3)
        bill = record(platform, f"leaves-{number}")
        bills.append(bill)
        more.append(bill["completion_tokens"] - had)
    assert {bill["status"] for bill in bills} == {"cancelled"}
    assert min(more) >= 0 and statistics.median(more) <= 4  # what was sent until the gateway noticed
    assert all(bill["completion_tokens"] < LONG / 2 for bill in bills), "gone soon after its client"
    assert all(bill["billed_gpu_ms"] > 0 for bill in bills)


def leave(platform: Platform, request_id: str, *, events: int) -> int:
    """Read so many events of a long stream from a bare socket, and close it; how many tokens had come."""
    with open_call(platform, request_id, return_token_ids=True) as client:
        seen = b""
        while seen.count(b"data: ") < events:
            part = client.recv(64)
            assert part, seen
            seen += part
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # a slow reader finds more than it waited for
            while part := client.recv(1 << 16):
                seen += part
    came = [json.loads(event) for event in re.findall(rb"data: (\{.*\})\n\n", seen)]
    return sum(len(choice["token_ids"]) for event in came for choice in event["choices"])


@contextlib.contextmanager
def open_call(
    platform: Platform, request_id: str, *, receive_bytes: int | None = None, **options: object
) -> Iterator[socket.socket]:
    """Return a bare socket on which a long stream was asked for, or what `options` say instead."""
    ASKED.add(request_id)
    body = {"model": MODEL, "prompt": "def f(", "max_tokens": LONG, "temperature": 0, "stream": True}
    data = json.dumps({**body, "ignore_eos": True, **options}).encode()
    where = urlsplit(platform.url)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\nx-request-id: {request_id}\r\n"
        f"authorization: Bearer {platform.key}\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    with socket.socket() as client:
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(PATIENCE_S)
        client.connect((where.hostname, where.port))
        client.sendall(head.encode() + data)
        yield client


@pytest.fixture
def impatient(platform: Platform, tmp_path: Path) -> Iterator[Platform]:
    """Return a second gateway of the platform, which gives up after 2 s on a client that takes nothing."""
    log = tmp_path / "gateway.log"
    flags = {
        "--redis-url": f"unix://{platform.data / 'redis.sock'}",
        "--store": str(platform.data / "store"),
        "--data-dir": str(platform.data),
        "--gateway-id": "impatient",
        "--port": "0",
        "--write-timeout": "2s",
    }
    with log.open("w") as out:
        command = [sys.executable, "-m", "gateway", *itertools.chain(*flags.items())]
        gateway = subprocess.Popen(command, cwd=ROOT, stderr=out)
    try:
        (url,) = platform.until(
            "the gateway listens", lambda: re.findall(r"listening on (http://\S+)", log.read_text())
        )
        yield replace(platform, url=url, env={**platform.env, "PID": str(gateway.pid)})
    finally:
        gateway.terminate()
        gateway.wait(PATIENCE_S)


def test_clients_that_read_nothing_are_cut_off_and_harm_nobody(
    platform: Platform, impatient: Platform, billed: str
) -> None:
    options = {"logprobs": 20, "return_token_ids": True}
    ask(impatient, "before", stream=False)
    gateway = psutil.Process(int(impatient.env["PID"]))
    node = psutil.Process(platform.instances(billed)[0]["pid"])
    before = [private_bytes(process) for process in (gateway, node)]
    with contextlib.ExitStack() as stack:
        for number in range(STUCK):
            stack.enter_context(open_call(impatient, f"stuck-{number}", receive_bytes=4096, **options))
        for number in range(3):
            bill = ask(impatient, f"beside-{number}", stream=True)
            assert (bill["status"], bill["completion_tokens"]) == ("ok", TOKENS)
        bills = [record(platform, f"stuck-{number}") for number in range(STUCK)]
        grown = [private_bytes(process) - was for process, was in zip((gateway, node), before, strict=True)]
        assert max(grown) < 64 << 20
        platform.until("the connections are gone", lambda: connections(gateway) == 0)
    assert {bill["status"] for bill in bills} == {"cancelled"}
    assert all(0 < bill["completion_tokens"] < LONG / 2 for bill in bills)


def private_bytes(process: psutil.Process) -> int:
    """Return the resident memory without what is shared: a node's KV cache grows with what it computes."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def connections(gateway: psutil.Process) -> int:
    """How many clients are connected."""
    port = {c.laddr.port for c in gateway.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return sum(c.laddr.port in port for c in gateway.net_connections("tcp") if c.status != psutil.CONN_LISTEN)


def test_the_report_is_the_sum_of_the_records(platform: Platform, billed: str) -> None:
    ask(platform, "last", stream=False)
    with platform.http() as http:
        columns = ("prompt_tokens", "completion_tokens", "billed_gpu_ms", "cost_nanos")
        sums: Counter[str] = Counter()
        for request_id in sorted(ASKED):  # nobody else calls this function
            found = http.get(f"/admin/usage/show/{request_id}").raise_for_status().json()
            sums.update({column: found[column] for column in columns} | {"requests": 1})
    (row,) = (row for row in platform.json("usage", "report") if row["function"] == billed)
    assert {column: row[column] for column in ("requests", *columns)} == dict(sums)
