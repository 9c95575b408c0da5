"""Rotation of logs that others go on writing to."""

import asyncio
import os
import threading
from pathlib import Path

from cli.supervise.rotation import rotate, rotate_logs
from rdmacast.aio.groups import cancel_and_wait
from tests.fixtures.log import Listener
from tests.fixtures.patience import PATIENCE_S, until


def test_older_files_move_on_and_the_oldest_goes(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    for text in ("first", "second", "third", "fourth"):
        log.write_text(text)
        rotate(log, kept=2)
        assert log.read_text() == ""
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "node-0.log": "",
        "node-0.log.1": "fourth",
        "node-0.log.2": "third",
    }
    assert (tmp_path / "node-0.log.1").stat().st_mode & 0o777 == 0o600


def test_fewer_are_kept_once_fewer_are_wanted(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    for number in range(1, 8):
        (tmp_path / f"x.log.{number}").write_text(str(number))
    (tmp_path / "x.log.txt").write_text("of somebody else")
    log.write_text("new")
    rotate(log, kept=3)
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == {
        "x.log": "",
        "x.log.1": "new",
        "x.log.2": "1",
        "x.log.3": "2",
        "x.log.txt": "of somebody else",
    }


def test_writers_go_on_at_the_start_of_the_same_file(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    writer = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(writer, b"before\n")
        rotate(log, kept=1)
        os.write(writer, b"after\n")
    finally:
        os.close(writer)
    assert log.read_bytes() == b"after\n"
    assert (tmp_path / "x.log.1").read_bytes() == b"before\n"


def test_lines_written_meanwhile_are_lost_at_the_cuts_only(tmp_path: Path) -> None:
    """How many depends on when the processor is taken away between the end of a copy and the cut."""
    log, count, rotations = tmp_path / "x.log", 20_000, 40

    def write() -> None:
        with log.open("ab", buffering=0) as file:
            for number in range(count):
                file.write(b"line %08d\n" % number)

    log.touch()
    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(rotations):
        rotate(log, kept=rotations)
        if not writer.is_alive():
            break
    writer.join()
    older = sorted(tmp_path.glob("x.log.*"), key=lambda path: -int(path.name.removeprefix("x.log.")))
    last = -1
    for part in (*older, log):
        whole = [line for line in part.read_bytes().splitlines() if len(line) == len(b"line 00000000")]
        numbers = [int(line.removeprefix(b"line ")) for line in whole]
        if numbers:
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert numbers[0] > last
            last = numbers[-1]


async def test_logs_that_have_grown_are_rotated_and_others_not(tmp_path: Path) -> None:
    (tmp_path / "big.log").write_bytes(b"x" * 100)
    (tmp_path / "small.log").write_bytes(b"x" * 99)
    (tmp_path / "other.txt").write_bytes(b"x" * 1000)
    task = asyncio.create_task(rotate_logs(tmp_path, 100, 1, check_s=0.01))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: (tmp_path / "big.log.1").exists())
            with (tmp_path / "small.log").open("ab") as file:
                file.write(b"y")
            await until(lambda: (tmp_path / "small.log.1").exists())
    finally:
        await cancel_and_wait(task)
    assert (tmp_path / "big.log").stat().st_size == 0
    assert (tmp_path / "other.txt").stat().st_size == 1000


async def test_a_log_that_cannot_be_rotated_grows_on(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"x" * 100)
    (tmp_path / ".a.log.new").mkdir()  # in the way of the copy
    (tmp_path / "b.log").write_bytes(b"x" * 100)
    with Listener.on("hypercast.up") as listener:
        task = asyncio.create_task(rotate_logs(tmp_path, 100, 3, check_s=0.01))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await listener.until_logged("cannot be rotated")
                await until(lambda: (tmp_path / "b.log.1").exists())
        finally:
            await cancel_and_wait(task)
    assert (tmp_path / "a.log").read_bytes() == b"x" * 100
