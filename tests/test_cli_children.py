"""What `up` does about its child processes when it cannot start one."""

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.children import Child, Nodes, together
from cli.errors import CliError
from cli.supervisor import ended, force_each_second, until_stopped
from tests.patience import PATIENCE_S


def test_a_child_that_cannot_be_started_for_a_while_is_started_when_it_can(tmp_path: Path) -> None:
    starts = 0
    running = asyncio.Event()

    def tidy() -> None:
        nonlocal starts
        starts += 1
        if starts in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        if starts == 4:
            running.set()

    async def main() -> None:
        async with Child("x", ["false"], tmp_path, tidy) as child, asyncio.timeout(PATIENCE_S):
            await running.wait()
            assert not child.keeper.done()

    asyncio.run(main())


def test_a_child_that_nobody_starts_again_ends_up_with_an_error(tmp_path: Path) -> None:
    starts = 0

    def tidy() -> None:
        nonlocal starts
        starts += 1
        if starts > 1:
            raise ValueError("a fault of the supervisor's own")

    async def main() -> None:
        async with Child("x", ["false"], tmp_path, tidy) as child, asyncio.timeout(PATIENCE_S):
            with pytest.raises(CliError, match=r"^x cannot be kept running: .*a fault of the supervisor"):
                await until_stopped(asyncio.Event(), [child])

    asyncio.run(main())


# In the place of `python -m invoker.zygote`: tells the test's socket what it is asked for, and answers
# with the next of the lines that the test has for it.
STAND_IN = """
import json, socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect(sys.argv[1])
    with link.makefile("rw") as test:
        for line in sys.stdin:
            print(json.loads(line)["spawn"]["id"], file=test, flush=True)
            answer = test.readline().strip()
            if answer == "die":
                sys.exit(1)
            if answer:
                print(answer, flush=True)
"""


async def asked_of_the_zygote(folder: Path, answers: Sequence[str], asks: int) -> list[str]:
    """What the stand-ins are asked for while they answer with `answers`, then with nothing."""
    asked: asyncio.Queue[str] = asyncio.Queue()
    left = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            writer.write(f"{next(left, '')}\n".encode())
            asked.put_nowait(line.decode().strip())
        writer.close()

    server = await asyncio.start_unix_server(serve, folder / "s")
    command = (sys.executable, "-c", STAND_IN, str(folder / "s"))
    async with server, Nodes({"a": [], "b": []}, folder, command) as nodes, asyncio.timeout(PATIENCE_S):
        names = [await asked.get() for _ in range(asks)]
        assert not nodes.keeper.done()
    return names


def test_a_node_that_the_zygote_could_not_start_is_asked_for_again(tmp_path: Path) -> None:
    answers = ['{"error": "cannot fork: Resource temporarily unavailable", "id": "a"}', "", ""]
    assert asyncio.run(asked_of_the_zygote(tmp_path, answers, 3)) == ["a", "b", "a"]


def test_a_node_that_waits_to_be_started_does_not_hold_up_the_next_zygote(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = ['{"exited": "a", "code": 1}', "die"]
    assert asyncio.run(asked_of_the_zygote(tmp_path, answers, 4)) == ["a", "b", "a", "b"]
    assert "the zygote is gone" not in caplog.text  # which `a` would have found at the end of its wait


def test_a_zygote_outlives_a_fork_that_fails(tmp_path: Path) -> None:
    code = """
import errno, os, sys
from invoker.zygote import main

forks = iter([True, False, True])

def fork():
    if next(forks):
        return os.fork()
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

sys.exit(main(fork))
"""
    orders = [{"spawn": {"id": name, "argv": ["--help"], "log": str(tmp_path / name)}} for name in "abc"]
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as zygote:
        assert zygote.stdin is not None and zygote.stdout is not None
        zygote.stdin.write("".join(f"{json.dumps(order)}\n" for order in orders))
        zygote.stdin.flush()
        told = [json.loads(zygote.stdout.readline()) for _ in range(5)]
        zygote.stdin.close()
        assert zygote.wait() == 0
    started = {event["spawned"] for event in told if "spawned" in event}
    ended = {(event["exited"], event["code"]) for event in told if "exited" in event}
    assert (started, ended) == ({"a", "c"}, {("a", 0), ("c", 0)})
    failed = [event for event in told if "error" in event]
    assert failed == [{"error": "cannot fork: Resource temporarily unavailable", "id": "b"}]


def test_children_that_run_together_are_stopped_together(tmp_path: Path) -> None:
    # Told to stop, the one opens a pipe to read and the other to write: each waits for the other.
    meet, met = tmp_path / "meet", tmp_path / "met"
    scripts = {"a": f"read word < {meet}; echo $word > {met}", "b": f"echo hello > {meet}"}
    children = []
    os.mkfifo(meet)
    for name, script in scripts.items():
        ready = tmp_path / f"{name}-ready"
        os.mkfifo(ready)
        loop = f"trap '{script}; exit' TERM; echo > {ready}; while :; do sleep 0.02; done"
        children.append(Child(name, ["sh", "-c", loop], tmp_path))

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), together(children):
            for name in scripts:
                await asyncio.to_thread((tmp_path / f"{name}-ready").read_text)

    asyncio.run(main())
    assert met.read_text() == "hello\n"


def test_a_disk_that_takes_long_is_told_once_until_it_is_quick_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hangs = iter([True, True, False, True])
    done = threading.Event()

    def force() -> None:
        hang = next(hangs, None)
        if hang is None:
            done.set()
        elif hang:
            time.sleep(0.6)

    async def main() -> None:
        forcing = asyncio.create_task(force_each_second(force, every_s=0.001, slow_s=0.5))
        assert await asyncio.to_thread(done.wait, PATIENCE_S)
        await ended(forcing)

    asyncio.run(main())
    assert caplog.text.count("takes more than") == 2
