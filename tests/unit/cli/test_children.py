"""What `up` does about its child processes when it cannot start one."""

import asyncio
import contextlib
import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from cli.errors import CliError
from cli.supervise.children import STOP_TIMEOUT_S, Child, Forked
from cli.supervise.orphans import orphans_taken, reap
from cli.supervise.supervisor import force_each_second, until_stopped
from rdmacast.aio.groups import cancel_and_wait
from tests.fixtures.log import Listener
from tests.fixtures.patience import PATIENCE_S


async def test_a_child_that_cannot_be_started_for_a_while_is_started_when_it_can(tmp_path: Path) -> None:
    starts = 0
    running = asyncio.Event()

    def tidy() -> None:
        nonlocal starts
        starts += 1
        if starts in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        if starts == 4:
            running.set()

    async with Child("x", ["false"], tmp_path, tidy) as child, asyncio.timeout(PATIENCE_S):
        await running.wait()
        assert not child.keeper.done()


async def test_a_child_that_nobody_starts_again_ends_up_with_an_error(tmp_path: Path) -> None:
    starts = 0

    def tidy() -> None:
        nonlocal starts
        starts += 1
        if starts > 1:
            raise ValueError("a fault of the supervisor's own")

    async with Child("x", ["false"], tmp_path, tidy) as child, asyncio.timeout(PATIENCE_S):
        with pytest.raises(CliError, match=r"^x cannot be kept running: .*a fault of the supervisor"):
            await until_stopped(asyncio.Event(), [child])


# In the place of `python -m cli.supervise.zygote`: reports each request to the test's socket, and answers
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
    """Return what the stand-ins are asked for while they answer with `answers`, then with nothing."""
    asked: asyncio.Queue[str] = asyncio.Queue()
    left = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            async for line in reader:
                writer.write(f"{next(left, '')}\n".encode())
                asked.put_nowait(line.decode().strip())

    server = await asyncio.start_unix_server(serve, folder / "s")
    command = (sys.executable, "-c", STAND_IN, str(folder / "s"))
    nodes = Forked("zygote", command, {"a": [], "b": []}, folder)
    async with server, nodes, asyncio.timeout(PATIENCE_S):
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


# In the place of the zygote: its nodes sleep. It reports each that it forks to the test's socket.
FORKING = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect(sys.argv[1])
    with link.makefile("w") as test:
        print("zygote", os.getpid(), file=test, flush=True)
        for line in sys.stdin:
            name = json.loads(line)["spawn"]["id"]
            pid = os.fork()
            if not pid:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.execvp("sleep", ["sleep", "1000"])
            print(json.dumps({"spawned": name, "pid": pid}), flush=True)
            print(name, pid, file=test, flush=True)
"""


@contextlib.asynccontextmanager
async def zygote_reports(folder: Path) -> AsyncIterator[asyncio.Queue[tuple[str, int]]]:
    """Yield the name and pid of each stand-in and of each process that they start."""
    reported: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            async for line in reader:
                name, pid = line.decode().split()
                reported.put_nowait((name, int(pid)))

    async with await asyncio.start_unix_server(serve, folder / "s"):
        yield reported


def test_nodes_outlive_their_zygote_and_the_next_one_starts_only_those_that_die(tmp_path: Path) -> None:
    async def main() -> list[int]:
        command = (sys.executable, "-c", FORKING, str(tmp_path / "s"))
        nodes = Forked("zygote", command, {"a": [], "b": []}, tmp_path)
        async with zygote_reports(tmp_path) as reported, nodes:
            async with asyncio.timeout(PATIENCE_S):
                (_, zygote), a, b = [await reported.get() for _ in range(3)]
                os.kill(zygote, signal.SIGKILL)
                assert (await reported.get())[0] == "zygote"
                assert nodes.pids >= {a[1], b[1]}
                os.kill(a[1], signal.SIGKILL)
                again = await reported.get()
                assert (again[0], reported.qsize()) == ("a", 0)
                assert b[1] in nodes.pids
        os.kill(again[1], signal.SIGKILL)  # this stand-in does not stop its own
        return [a[1], b[1]]

    with orphans_taken():
        first = asyncio.run(main())
        assert os.waitpid(-1, 0)[1] == signal.SIGKILL  # the last `a`: there is no other child left
    assert not any(Path(f"/proc/{pid}").exists() for pid in first)


async def test_a_zygote_that_still_imports_is_not_waited_for(tmp_path: Path) -> None:
    async with asyncio.timeout(STOP_TIMEOUT_S / 2):
        async with Forked("zygote", ("sleep", "1000"), {"a": []}, tmp_path):
            pass


def test_a_node_that_was_asked_of_a_dead_zygote_is_asked_of_the_next_one(tmp_path: Path) -> None:
    script, away = tmp_path / "zygote", tmp_path / "away"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    script.chmod(0o700)

    async def main() -> int:
        command = (str(script), "-c", FORKING, str(tmp_path / "s"))
        async with zygote_reports(tmp_path) as reported, Forked("zygote", command, {"a": []}, tmp_path):
            with Listener.on("hypercast.up") as log:
                async with asyncio.timeout(PATIENCE_S):
                    (_, zygote), (_, a) = [await reported.get() for _ in range(2)]
                    script.rename(away)  # no zygote can be started
                    os.kill(zygote, signal.SIGKILL)
                    await log.until_logged("zygote cannot be started")
                    os.kill(a, signal.SIGKILL)
                    await log.until_logged("zygote has ended; a starts with the next one")
                    away.rename(script)
                    names, pids = zip(*[await reported.get() for _ in range(2)], strict=True)
                    assert names == ("zygote", "a")
        os.kill(pids[1], signal.SIGKILL)  # this stand-in does not stop its own
        return int(pids[1])

    with orphans_taken():
        again = asyncio.run(main())
        assert os.waitpid(again, 0)[1] == signal.SIGKILL


def test_what_a_dead_child_had_started_is_reaped_and_what_is_known_is_left() -> None:
    with orphans_taken(), subprocess.Popen(["sleep", "1000"]) as own:
        try:
            seen = 0
            while seen := reap([own.pid], seen):
                pass  # what other tests left
            # It ends once the shell is gone, which would else reap it.
            readable, writable = os.pipe()
            script = "exec 3<&0; cat <&3 > /dev/null & echo $!; exec true"
            done = subprocess.run(["sh", "-c", script], stdin=readable, stdout=subprocess.PIPE, check=True)
            os.close(readable)
            os.close(writable)
            stray = int(done.stdout)
            with contextlib.suppress(ChildProcessError):  # once it is not there
                os.waitid(os.P_PID, stray, os.WEXITED | os.WNOWAIT)
            assert reap([own.pid], 0) == stray  # it might be somebody's whose number is not known yet
            assert reap([own.pid], stray) == 0
            assert not Path(f"/proc/{stray}").exists()
        finally:
            own.kill()
        os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
        assert reap([own.pid], own.pid) == own.pid
        assert own.wait() == -signal.SIGKILL
        assert reap([], 0) == 0


def test_a_zygote_outlives_a_fork_that_fails(tmp_path: Path) -> None:
    code = """
import errno, os, sys
from cli.supervise.zygote import main

forks = iter([True, False, True])

def fork():
    if next(forks):
        return os.fork()
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

sys.exit(main("invoker", fork))
"""
    orders = [{"spawn": {"id": name, "argv": ["--help"], "log": str(tmp_path / name)}} for name in "abc"]
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as zygote:
        assert zygote.stdin is not None and zygote.stdout is not None
        zygote.stdin.write("".join(f"{json.dumps(order)}\n" for order in orders))
        zygote.stdin.flush()
        reported = [json.loads(zygote.stdout.readline()) for _ in range(5)]
        zygote.stdin.close()
        assert zygote.wait() == 0
    started = {event["spawned"] for event in reported if "spawned" in event}
    ended = {(event["exited"], event["code"]) for event in reported if "exited" in event}
    assert (started, ended) == ({"a", "c"}, {("a", 0), ("c", 0)})
    failed = [event for event in reported if "error" in event]
    assert failed == [{"error": "cannot fork: Resource temporarily unavailable", "id": "b"}]


def test_a_zygote_that_dies_in_the_middle_of_a_fork_leaves_no_node_that_nobody_knows(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from cli.supervise.zygote import main

def fork():
    pid = os.fork()
    if pid:
        while os.getsid(pid) != pid:  # it outlives its zygote from then on
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    return pid

sys.exit(main("invoker", fork))
"""
    order = {"spawn": {"id": "a", "argv": ["--help"], "log": str(tmp_path / "a")}}
    with (
        orphans_taken(),
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as zygote,
    ):
        reported, _ = zygote.communicate(json.dumps(order) + "\n")
        event = json.loads(reported)
        assert (event["spawned"], os.waitpid(event["pid"], 0)) == ("a", (event["pid"], 0))


def test_a_disk_that_takes_long_is_told_once_until_it_is_quick_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hangs = iter([True, True, False, True])
    done = threading.Event()
    slow_s = 0.5

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def force() -> None:
            hang = next(hangs, None)
            if hang is None:
                done.set()
            elif hang:
                # A timer that is set after the warning's, for as long, goes off after it.
                passed = threading.Event()
                loop.call_soon_threadsafe(loop.call_later, slow_s, passed.set)
                assert passed.wait(PATIENCE_S)

        forcing = asyncio.create_task(force_each_second(force, every_s=0.001, slow_s=slow_s))
        assert await asyncio.to_thread(done.wait, PATIENCE_S)
        await cancel_and_wait(forcing)

    asyncio.run(main())
    assert caplog.text.count("takes more than") == 2
