"""The restrictions that a handler's process puts on itself before it runs user code (Linux).

It can gain no privilege, drops all capabilities and may not exceed its limits. Landlock (`landlock`)
closes files, TCP and signals, a seccomp filter (`seccomp`) the system calls that Landlock does not see. Both
need no rights, so that they work in a container without capabilities, too.
"""

import ctypes
import os
import resource
import signal
import struct
from contextlib import suppress
from pathlib import Path

import msgspec

from invoker.handlers import seccomp
from invoker.handlers.landlock import TCP_VERSION, landlock_version, restrict
from invoker.handlers.syscalls import check, libc, prctl
from registry.config.handler_spec import HandlerLimits

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_GET_NO_NEW_PRIVS = 39
_CAPABILITY_VERSION_3 = 0x20080522
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}

# Mapped libraries are shared and clean, so they count against address space, not against memory.
_LIBRARIES_BYTES = 8 << 30
_FIRST_TO_GO = b"800"  # of -1000 to 1000: what the kernel kills when the machine's memory is full

CEILINGS = HandlerLimits(
    memory_bytes=16 << 30,
    cpu_s=3600,
    timeout_s=3600,
    output_bytes=64 << 20,
    file_bytes=4 << 30,
    open_files=4096,
    threads=64,
    tasks=4096,
)


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """What a node lets handlers do.

    With `network` they reach whatever the node reaches by IP, but not `redis_port`, the port of Redis where
    that is on TCP (else 0). `ceilings` are the highest limits that a function may ask for. If `unconfined`,
    parts that the kernel lacks are left out.
    """

    network: bool = False
    redis_port: int = 0
    unconfined: bool = False
    ceilings: HandlerLimits = CEILINGS

    def missing(self) -> list[str]:
        """Return what this kernel lacks of the restrictions, in words."""
        return missing_parts(
            landlock_version(), seccomp.supports_seccomp(), needs_tcp=self.network and self.redis_port > 0
        )


DEFAULT_SANDBOX = Sandbox()


def missing_parts(landlock: int, has_seccomp: bool, *, needs_tcp: bool) -> list[str]:
    """Return the missing parts for a version of Landlock (0: none) and the support of filters."""
    parts = []
    if landlock < 1:
        parts.append("Landlock (Linux 5.13 or later, with `landlock` among the kernel's `lsm=`)")
    elif landlock < TCP_VERSION and needs_tcp:
        parts.append(
            "Landlock's rules for TCP (Linux 6.7), without which --handler-network would open Redis, too"
        )
    if not has_seccomp:
        parts.append("seccomp filters (CONFIG_SECCOMP_FILTER, on x86_64 or aarch64)")
    return parts


def confine(own: Path, limits: HandlerLimits, sandbox: Sandbox) -> None:
    """Restrict this process to `own` and its limits. Call it before the first thread. Raises OSError.

    The handler is the leader of its process group.
    """
    _drop_privileges()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_FIRST_TO_GO)
    version = landlock_version()
    if version or not sandbox.unconfined:
        restrict(
            own, network=sandbox.network, closed_port=sandbox.redis_port if version >= TCP_VERSION else 0
        )
    set_limits(limits)
    if seccomp.supports_seccomp() or not sandbox.unconfined:
        seccomp.install(pid=os.getpid(), network=sandbox.network, landlock=version)


def die_with(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when its parent ends; exit if it has ended already."""
    prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def close_descriptors(*, keep: int) -> None:
    """Close all inherited descriptors but the standard streams and `keep`: not every event loop does."""
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number != keep:
            with suppress(OSError):  # the listing's own descriptor is closed
                os.close(number)


def hide_memory() -> None:
    """Forbid processes of the same user to read this process's memory and environment."""
    prctl(_PR_SET_DUMPABLE, 0)


def supports_no_new_privs() -> bool:
    """Return whether this kernel can forbid a process to gain privileges."""
    return libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) >= 0


def set_limits(limits: HandlerLimits) -> None:
    """Set the resource limits. Memory counts from the current use, so that the limit is the user's."""
    address_space, data = _used_bytes()
    _limit(resource.RLIMIT_DATA, data + limits.memory_bytes)
    _limit(resource.RLIMIT_AS, address_space + limits.memory_bytes + _LIBRARIES_BYTES)
    _limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    _limit(resource.RLIMIT_NOFILE, limits.open_files)
    _limit(resource.RLIMIT_CORE, 0)


def _drop_privileges() -> None:
    """Drop all capabilities, for this process and every program that it starts."""
    for capability in range(64):
        # Fails beyond the kernel's last capability, or without the right to, both harmlessly.
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    number = _SYS_CAPSET.get(os.uname().machine)
    if number is not None:
        header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), 8)
        nothing = ctypes.create_string_buffer(24)
        check(libc.syscall(number, header, nothing), "capset")
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


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
