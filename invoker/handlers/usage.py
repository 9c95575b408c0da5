"""What a process group uses, read from /proc: processes and threads, memory, processor time."""

import os
from contextlib import suppress
from pathlib import Path

import msgspec

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_COUNTED = {"RssAnon", "RssShmem"}


class GroupUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The use of a process group.

    `memory_bytes` is anonymous and shared memory, not mapped files.
    A page that processes share counts in each.
    """

    tasks: int = 0  # processes and threads
    memory_bytes: int = 0
    cpu_s: float = 0.0  # with that of children which were waited for


def group_usage(group: int, most_tasks: int) -> GroupUsage:
    """Return what the group uses now; of more than `most_tasks` processes only their number.

    It reads no file that needs a process's memory map, as smaps does: one that forks without end holds its
    lock.
    """
    pids = _members(group)
    if len(pids) > most_tasks:
        return GroupUsage(tasks=len(pids))
    tasks, memory_bytes, cpu_s = 0, 0, 0.0
    for pid in pids:
        # After the name, which may contain anything: field 3, the state, is the first.
        fields = _read(_PROC / str(pid) / "stat").rpartition(")")[2].split()
        if len(fields) > 17:  # else it has ended
            cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_S
            tasks += int(fields[17])
            memory_bytes += memory_bytes_of(pid)
    return GroupUsage(tasks=tasks, memory_bytes=memory_bytes, cpu_s=cpu_s)


def memory_bytes_of(pid: int) -> int:
    """Return the anonymous and shared memory of a process, 0 if it has ended."""
    lines = (line.partition(":") for line in _read(_PROC / str(pid) / "status").splitlines())
    return sum(int(rest.split()[0]) * 1024 for name, _, rest in lines if name in _COUNTED)


def _members(group: int) -> list[int]:
    pids = []
    with os.scandir(_PROC) as entries:
        for pid in [int(entry.name) for entry in entries if entry.name.isdigit()]:
            with suppress(OSError):  # it has ended
                if os.getpgid(pid) == group:
                    pids.append(pid)
    return pids


def _read(path: Path) -> str:
    """Return the file's text, "" if the process has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
