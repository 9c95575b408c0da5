"""The system calls that a handler's process may not make: a seccomp filter, in BPF (Linux).

It closes what Landlock has no hook for: sockets, limits and priorities of other processes, memory that no
limit counts, attributes of files. A process cannot leave the handler's process group, so that one signal
ends all of it. Threads and children inherit the filter; nothing removes it.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Sequence

import msgspec

from invoker.handlers.landlock import SIGNAL_SCOPE_VERSION, TRUNCATE_VERSION
from invoker.handlers.syscalls import prctl

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_LOAD, _AND, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_X32 = 0x40000000

# Of an architecture: the audit number, and which column of the tables below has its calls.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

_NONE = -1  # the architecture has no such call
_FORBIDDEN: dict[str, tuple[int, int]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241),
    # memory that no limit counts, and objects of other processes of the user
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # ways around the other rules, and large parts of the kernel
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "inotify_add_watch": (254, 27),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "syslog": (103, 116),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "modify_ldt": (154, _NONE),
    # attributes of files that the user owns, wherever they are
    "chown": (92, _NONE),
    "fchown": (93, 55),
    "lchown": (94, _NONE),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
# These succeed and do nothing: programs that copy files or start children make them as a matter of course.
_IGNORED: dict[str, tuple[int, int]] = {
    "chmod": (90, _NONE),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "utime": (132, _NONE),
    "utimes": (235, _NONE),
    "futimesat": (261, _NONE),
    "utimensat": (280, 88),
    "setsid": (112, 157),
    "setpgid": (109, 154),
}
# clone3 has its flags in memory, which a filter cannot read; libraries then use clone.
_ABSENT: dict[str, tuple[int, int]] = {"clone3": (435, 435)}

_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_STREAM, _DATAGRAM, _SEQPACKET, _TYPE_MASK = 1, 2, 5, 0xF
_TCP, _UDP = 6, 17
_MSG_FASTOPEN = 0x20000000
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_F_SETOWN, _F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 8, 15, 0x8901, 0x8902
_PR_SET_PDEATHSIG = 1
_OF_PROCESS, _IO_OF_PROCESS = 0, 1


class _Check(msgspec.Struct, frozen=True):
    """Continue if argument `index`, masked, is one of `values`, or is none of them if `excluded`."""

    index: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    excluded: bool = False


_Rules = dict[tuple[int, int], tuple[_Check, ...]]


def supports_seccomp() -> bool:
    """Return whether this machine's system calls are known and its kernel has filters."""
    try:
        with open("/proc/sys/kernel/seccomp/actions_avail") as file:
            return os.uname().machine in _MACHINES and "errno" in file.read()
    except OSError:
        return False


def install(*, pid: int, network: bool, landlock: int) -> None:
    """Filter the system calls of this thread and those it starts. Raises OSError.

    `pid` is the process and group of the handler, `landlock` the version of Landlock, whose gaps are closed.
    """
    code = program(os.uname().machine, pid=pid, network=network, landlock=landlock)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(header, len(header)))


def program(machine: str, *, pid: int, network: bool, landlock: int) -> bytes:
    """Return the filter for an architecture as BPF instructions."""
    audit, column = _MACHINES[machine]
    code = [
        *(_load(4), _jump(_JUMP_EQUAL, audit, 1, 0), _return(_KILL)),
        *(_load(0), _jump(_JUMP_GREATER_EQUAL, _X32, 0, 1), _return(_ERRNO | errno.ENOSYS)),
    ]
    for calls, code_of_error in ((_FORBIDDEN, errno.EPERM), (_IGNORED, 0), (_ABSENT, errno.ENOSYS)):
        for numbers in calls.values():
            code += _block(numbers[column], [_return(_ERRNO | code_of_error)])
    for numbers, checks in _rules(pid, network, landlock).items():
        code += _block(numbers[column], _checked(checks))
    return b"".join([*code, _return(_ALLOW)])


def _rules(pid: int, network: bool, landlock: int) -> _Rules:
    """Return the calls that are allowed with some arguments, by their numbers."""
    own = _Check(0, (0, pid))
    rules: _Rules = {
        (53, 199): (_Check(0, (_AF_UNIX,)), _Check(1, (_STREAM, _SEQPACKET), _TYPE_MASK)),  # socketpair
        (56, 220): (_Check(0, (0,), _NEW_NAMESPACES),),  # clone
        (72, 25): (_Check(1, (_F_SETOWN, _F_SETOWN_EX), excluded=True),),  # fcntl
        (16, 29): (_Check(1, (_FIOSETOWN, _SIOCSPGRP), excluded=True),),  # ioctl
        (157, 167): (_Check(0, (_PR_SET_PDEATHSIG,), excluded=True),),  # prctl
        (302, 261): (own,),  # prlimit64
        (203, 122): (own,),  # sched_setaffinity
        (144, 119): (own,),  # sched_setscheduler
        (142, 118): (own,),  # sched_setparam
        (314, 274): (own,),  # sched_setattr
        (256, 238): (own,),  # migrate_pages
        (279, 239): (own,),  # move_pages
        (141, 140): (_Check(0, (_OF_PROCESS,)), _Check(1, (0, pid))),  # setpriority
        (251, 30): (_Check(0, (_IO_OF_PROCESS,)), _Check(1, (0, pid))),  # ioprio_set
    }
    if network:
        rules[41, 198] = (
            _Check(0, (_AF_INET, _AF_INET6)),
            _Check(1, (_STREAM, _DATAGRAM), _TYPE_MASK),
            _Check(2, (0, _TCP, _UDP)),
        )
        # Landlock does not see a connection that begins with its first data.
        for numbers, flags in {
            (44, 206): 3,
            (46, 211): 2,
            (307, 269): 3,
        }.items():  # sendto, sendmsg, sendmmsg
            rules[numbers] = (_Check(flags, (0,), _MSG_FASTOPEN),)
    else:
        rules[41, 198] = (_Check(0, ()),)  # socket
    if landlock < TRUNCATE_VERSION:
        rules[76, 45] = (_Check(0, ()),)  # truncate
    if landlock < SIGNAL_SCOPE_VERSION:
        rules |= _signal_rules(pid)
    return rules


def _signal_rules(pid: int) -> _Rules:
    """Return rules that allow signals to the handler itself and its whole group only, not to its children."""
    itself = _Check(0, (pid,))
    return {
        (62, 129): (_Check(0, (0, pid, (1 << 32) - pid)),),  # kill
        (200, 130): (itself,),  # tkill
        (234, 131): (itself,),  # tgkill
        (129, 138): (itself,),  # rt_sigqueueinfo
        (297, 240): (itself,),  # rt_tgsigqueueinfo
        (424, 424): (_Check(0, ()),),  # pidfd_send_signal
    }


def _block(number: int, body: Sequence[bytes]) -> Iterable[bytes]:
    """Return code that runs `body`, which ends with a return, for one system call."""
    return () if number == _NONE else (_jump(_JUMP_EQUAL, number, 0, len(body)), *body)


def _checked(checks: Sequence[_Check]) -> list[bytes]:
    """Return code that allows a call if all checks hold, and refuses it otherwise."""
    code: list[bytes] = []
    refusal = _return(_ERRNO | errno.EPERM)
    for check in checks:
        code += [_load(16 + 8 * check.index), struct.pack("=HBBI", _AND, 0, 0, check.mask)]
        if check.excluded:
            for value in check.values:
                code += [_jump(_JUMP_EQUAL, value, 0, 1), refusal]
        else:
            # A hit jumps over the comparisons that follow, and over the refusal.
            hits = range(len(check.values), 0, -1)
            code += [
                *(_jump(_JUMP_EQUAL, value, hit, 0) for value, hit in zip(check.values, hits, strict=True)),
                refusal,
            ]
    return [*code, _return(_ALLOW)]


def _load(offset: int) -> bytes:
    """Return the instruction that loads a word of the call's seccomp_data."""
    return struct.pack("=HBBI", _LOAD, 0, 0, offset)


def _jump(kind: int, value: int, hit: int, miss: int) -> bytes:
    return struct.pack("=HBBI", kind, hit, miss, value)


def _return(action: int) -> bytes:
    return struct.pack("=HBBI", _RETURN, 0, 0, action)
