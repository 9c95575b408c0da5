"""The restrictions that a handler's process puts on itself before it runs user code (Linux).

It can gain no privilege, drops root's capabilities, ends with the node and may not exceed its limits. Where
the kernel has Landlock it can access only its own folder, Python and the system's libraries. The network
stays open: a handler may call other services.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522

_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
# The Landlock calls have one number on every architecture.
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_PATH_BENEATH = 1

_EXECUTE, _WRITE, _READ, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_FILE_RIGHTS = _EXECUTE | _WRITE | _READ | (1 << 14) | (1 << 15)
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1

# Mapped libraries are shared and clean, so they count against address space, not against memory.
_LIBRARIES_BYTES = 8 << 30

_READABLE = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/proc",
    "/sys/devices/system",
    "/etc/ssl",
    "/etc/pki",
    "/etc/ca-certificates",
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/localtime",
    "/etc/ld.so.cache",
    "/etc/mime.types",
    "/etc/passwd",
    "/etc/group",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; exit at once if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def close_descriptors(*, keep: int) -> None:
    """Close all inherited descriptors but the standard streams and `keep`: not every event loop does."""
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number != keep:
            with suppress(OSError):  # the listing's own descriptor is closed
                os.close(number)


def hide_memory() -> None:
    """Forbid processes of the same user to read this process's memory and environment."""
    _prctl(_PR_SET_DUMPABLE, 0)


def drop_privileges() -> None:
    """Drop root's capabilities, for this process and every program that it starts."""
    if os.geteuid() == 0:
        for capability in range(64):
            # Fails beyond the kernel's last capability, harmlessly.
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        number = _SYS_CAPSET.get(os.uname().machine)
        if number is not None:
            header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), 8)
            nothing = ctypes.create_string_buffer(24)
            _check(_libc.syscall(number, header, nothing), "capset")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def set_limits(*, memory_bytes: int, file_bytes: int, open_files: int) -> None:
    """Set the resource limits. Memory counts from the current use, so that the limit is the user's."""
    address_space, data = _used_bytes()
    _limit(resource.RLIMIT_DATA, data + memory_bytes)
    _limit(resource.RLIMIT_AS, address_space + memory_bytes + _LIBRARIES_BYTES)
    _limit(resource.RLIMIT_FSIZE, file_bytes)
    _limit(resource.RLIMIT_NOFILE, open_files)
    _limit(resource.RLIMIT_CORE, 0)


def landlock_version() -> int:
    """Return the kernel's Landlock ABI version, 0 where there is none."""
    return max(0, int(_libc.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def close_file_system(own: Path) -> bool:
    """Restrict this thread, and those it starts, to write only `own` and read only Python and the system.

    Call it before the first thread. Returns False where the kernel has no Landlock.
    """
    version = landlock_version()
    if version < 1:
        return False
    # Rights that an older kernel lacks must not be named: 13 in the first version, then
    # refer (2), truncate (3) and ioctl on devices (5). Signals and abstract sockets came with 6.
    rights = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= 6 else 0
    attribute = struct.pack("=QQQ", rights, 0, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    buffer = ctypes.create_string_buffer(attribute, len(attribute))
    ruleset = _libc.syscall(_SYS_LANDLOCK_CREATE, buffer, ctypes.c_size_t(len(attribute)), 0)
    _check(min(ruleset, 0), "landlock_create_ruleset")
    try:
        read_only = _EXECUTE | _READ | _READ_DIR
        for path in (*_READABLE, sys.prefix, sys.base_prefix, sys.exec_prefix):
            _allow(ruleset, Path(path), rights & read_only)
        for path in (*_DEVICES, *_gpu_devices()):
            _allow(ruleset, Path(path), rights & (_READ | _WRITE | (1 << 15)))
        _allow(ruleset, own, rights)
        _check(_libc.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, path: Path, rights: int) -> None:
    """Grant `rights` beneath `path`; do nothing if it does not exist."""
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not path.is_dir():
            rights &= _FILE_RIGHTS
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, folder), 12)
        _check(
            _libc.syscall(_SYS_LANDLOCK_ADD, ruleset, _LANDLOCK_PATH_BENEATH, rule, 0), "landlock_add_rule"
        )
    finally:
        os.close(folder)


def _gpu_devices() -> Iterable[str]:
    return (str(path) for path in Path("/dev").glob("nvidia*"))


def _used_bytes() -> tuple[int, int]:
    """Return this process's address space and data segment, as the kernel counts them."""
    sizes = {"VmSize": 0, "VmData": 0}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in sizes:
            sizes[name] = int(rest.split()[0]) * 1024
    return sizes["VmSize"], sizes["VmData"]


def _limit(kind: int, value: int) -> None:
    """Set a limit, at most the current ceiling."""
    _, ceiling = resource.getrlimit(kind)
    if ceiling != resource.RLIM_INFINITY:
        value = min(value, ceiling)
    resource.setrlimit(kind, (value, value))


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def _check(result: int, call: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
