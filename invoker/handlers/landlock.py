"""Landlock: what a handler's process may read, write and connect to (Linux 5.13)."""

import ctypes
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from invoker.handlers.syscalls import check, libc

SIGNAL_SCOPE_VERSION = 6
TCP_VERSION = 4
TRUNCATE_VERSION = 3

# The Landlock calls have one number on every architecture.
_SYS_CREATE, _SYS_ADD, _SYS_RESTRICT = 444, 445, 446
_PATH_BENEATH, _NET_PORT = 1, 2
_EXECUTE, _WRITE, _READ, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_READ_ONLY = _EXECUTE | _READ | _READ_DIR
_FILE_RIGHTS = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1

_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sys/devices/system")
_CONFIGURATION = tuple(
    f"/etc/{name}"
    for name in (
        *("ssl", "pki", "ca-certificates", "resolv.conf", "hosts", "host.conf", "nsswitch.conf"),
        *("gai.conf", "localtime", "ld.so.cache", "mime.types", "passwd", "group"),
    )
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Of /proc only figures of the machine and files of the handler's own process: not net, no other processes.
_MACHINE = tuple(
    f"/proc/{name}"
    for name in (
        *("cpuinfo", "meminfo", "stat", "loadavg", "uptime", "version", "vmstat", "filesystems", "devices"),
        *("sys", "driver"),
    )
)
_PROCESS = ("cmdline", "status", "stat", "statm", "maps", "smaps", "fd", "limits", "mountinfo", "cgroup")


def landlock_version() -> int:
    """Return the kernel's Landlock ABI version, 0 where there is none."""
    return max(0, int(libc.syscall(_SYS_CREATE, None, ctypes.c_size_t(0), 1)))


def pin_proc(pid: int) -> None:
    """Keep open what the process `pid` may read in /proc, for this process's life.

    A rule is for an inode, and procfs forgets the inodes of files that nobody has open.
    """
    for path in (*_MACHINE, *(f"/proc/{pid}/{name}" for name in _PROCESS)):
        with suppress(OSError):
            os.open(path, os.O_PATH | os.O_CLOEXEC)


def restrict(own: Path, *, network: bool, closed_port: int) -> None:
    """Restrict this thread, and those it starts, to write only `own` and read only Python and the system.

    Without `network` it can bind or connect no TCP socket, else it can connect to any port but `closed_port`
    (0: to any). Call it before the first thread. Raises OSError.
    """
    version = landlock_version()
    # Rights that an older kernel lacks must not be named: 13 in the first version, then
    # refer (2), truncate (3) and ioctl on devices (5).
    rights = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    tcp = (_CONNECT_TCP if closed_port else 0) if network else _BIND_TCP | _CONNECT_TCP
    scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS
    attribute = struct.pack("=QQQ", rights, tcp, scopes)
    attribute = attribute[: 8 if version < TCP_VERSION else 16 if version < SIGNAL_SCOPE_VERSION else 24]
    with _ruleset(attribute) as ruleset:
        process = (f"/proc/self/{name}" for name in _PROCESS)
        prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix)
        for path in (*_SYSTEM, *_CONFIGURATION, *_MACHINE, *process, *prefixes):
            _allow_path(ruleset, Path(path), rights & _READ_ONLY)
        for path in (*_DEVICES, *_gpu_devices()):
            _allow_path(ruleset, Path(path), rights & (_READ | _WRITE | _IOCTL))
        _allow_path(ruleset, own, rights)
        if network and closed_port:
            _allow_ports(ruleset, closed_port)
        check(libc.syscall(_SYS_RESTRICT, ruleset, 0), "landlock_restrict_self")


@contextmanager
def _ruleset(attribute: bytes) -> Iterator[int]:
    buffer = ctypes.create_string_buffer(attribute, len(attribute))
    ruleset = libc.syscall(_SYS_CREATE, buffer, ctypes.c_size_t(len(attribute)), 0)
    check(min(ruleset, 0), "landlock_create_ruleset")
    try:
        yield ruleset
    finally:
        os.close(ruleset)


def _allow_path(ruleset: int, path: Path, rights: int) -> None:
    """Grant `rights` beneath `path`; do nothing if it does not exist."""
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not path.is_dir():
            rights &= _FILE_RIGHTS
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, folder), 12)
        check(libc.syscall(_SYS_ADD, ruleset, _PATH_BENEATH, rule, 0), "landlock_add_rule")
    finally:
        os.close(folder)


def _allow_ports(ruleset: int, closed: int) -> None:
    """Grant connections to every port but one: there are only rules that allow."""
    rule = (ctypes.c_uint64 * 2)(_CONNECT_TCP)
    add = libc.syscall
    for port in range(1, 1 << 16):
        if port != closed:
            rule[1] = port
            check(add(_SYS_ADD, ruleset, _NET_PORT, rule, 0), "landlock_add_rule")


def _gpu_devices() -> Iterable[str]:
    return (str(path) for path in Path("/dev").glob("nvidia*"))
