"""Calls of the kernel that Python has no function for (Linux)."""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int, pointer: object = 0) -> None:
    """Call prctl(2). Raises OSError."""
    check(libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), "prctl")


def check(result: int, call: str) -> None:
    """Raise OSError, with the name of the call, if its result is an error."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
