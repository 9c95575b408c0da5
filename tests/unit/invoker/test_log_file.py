"""The last log lines of a node, after its process was killed."""

import os
from pathlib import Path

from invoker.log_file import MAX_FILE_BYTES, MAX_RECOVERED, LogFile, recover_logs
from invoker.log_rings import LoggedLine, LogRings
from registry.clock import FakeClock


def kill(file: LogFile) -> None:
    """Do what the end of its process does: the lock goes, the file stays."""
    os.close(file._fd)
    file._fd = -1


def texts(folder: Path) -> list[list[str]]:
    return [[line.text for line in one.lines] for one in recover_logs(folder)]


def test_lines_survive_a_kill_once(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "journals", "n0", 3)
    rings = LogRings(FakeClock(), file.write)
    rings.add("f", 2, "one\nüñ\u2028\x85two")
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert recover_logs(tmp_path / "journals") == [], "the node runs"
    kill(file)
    (found,) = recover_logs(tmp_path / "journals")
    assert found.node == "n0"
    assert [(line.function, line.version) for line in found.lines] == [("f", 2), ("f", 2)]
    assert tuple(line.text for line in found.lines) == rings.tail("f", 10)
    assert recover_logs(tmp_path / "journals") == [] and not list((tmp_path / "journals").iterdir())


def test_a_recovered_line_is_kept_over_a_second_kill(tmp_path: Path) -> None:
    first = LogFile(tmp_path, "n0", 1)
    LogRings(FakeClock(), first.write).add("f", 1, "of the first")
    kill(first)
    (found,) = recover_logs(tmp_path)
    second = LogFile(tmp_path, "n0", 2)
    rings = LogRings(FakeClock(), second.write)
    rings.recover(found.lines)
    assert rings.tail("f", 10) == tuple(line.text for line in found.lines)
    kill(second)
    assert texts(tmp_path) == [[line.text for line in found.lines]]


def test_the_file_is_bounded_and_has_the_last_lines(tmp_path: Path) -> None:
    file = LogFile(tmp_path, "n0", 1)
    count = 4000
    for number in range(count):
        file.write([LoggedLine("f", 1, f"{number} " + 'x"\\\n' * (number % 400))])
    assert file.path.stat().st_size <= MAX_FILE_BYTES
    kill(file)
    (lines,) = texts(tmp_path)
    numbers = [int(text.split(" ")[0]) for text in lines]
    assert numbers == list(range(numbers[0], count)), "in order, without a gap"
    assert sum(map(len, lines)) > MAX_FILE_BYTES // 2


def test_what_a_function_prints_makes_no_line_of_another(tmp_path: Path) -> None:
    file = LogFile(tmp_path, "n0", 1)
    forged = '[9,"victim",1,"forged"]'
    for _ in range(3000):
        file.write([LoggedLine("f", 1, f"{forged}\n{forged}\n" * 20)])
    kill(file)
    (found,) = recover_logs(tmp_path)
    assert {line.function for line in found.lines} == {"f"}


def test_damaged_files_links_and_too_many_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "n1.1.lines").write_bytes(b"\xff\x00[1,2\n" + b'[1,"f",1,"whole"]\n')
    secret = tmp_path / "elsewhere"
    secret.write_text('[1,"f",1,"of another file"]\n')
    (tmp_path / "n2.1.lines").symlink_to(secret)
    assert texts(tmp_path) == [["whole"]]
    assert secret.exists()
    (tmp_path / "n2.1.lines").unlink()
    for number in range(MAX_RECOVERED + 3):
        path = tmp_path / f"n{number}.9.lines"
        path.unlink(missing_ok=True)
        path.write_text(f'[1,"f",1,"{number}"]\n')
        os.utime(path, (number, number))
    assert texts(tmp_path) == [[str(number)] for number in range(3, MAX_RECOVERED + 3)]
    assert not list(tmp_path.glob("*.lines"))


def test_a_node_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    file = LogFile(tmp_path, "n0", 1)
    file.write([LoggedLine("f", 1, "text")])
    file.close()
    file.close()
    file.write([LoggedLine("f", 1, "late")])
    assert not list(tmp_path.iterdir())
