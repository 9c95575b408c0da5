"""What function.yaml declares of a handler: its function, environment and limits.

The process of a handler imports this, so it imports little itself.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from registry.errors import InvalidRecord

_MIB = 1024**2
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Names that steer loaders, interpreters, allocators, or which devices and files a handler gets.
_RESERVED_ENV = re.compile(
    r"(LD|DYLD|GLIBC|GCONV|MALLOC|OPENSSL|BASH|NVIDIA|HYPERCAST)_.*|PYTHON.*"
    r"|PATH|HOME|TMP|TEMP|TMPDIR|ENV|IFS|SHELL|LOCPATH|NLSPATH|HOSTALIASES|LOCALDOMAIN|RES_OPTIONS"
    r"|SSL_CERT_(FILE|DIR)|CUDA_VISIBLE_DEVICES"
)
# The least and the most that a function may ask for; a node has ceilings of its own.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "memory_bytes": (16 * _MIB, 1 << 44),
    "cpu_s": (1, 86400),
    "timeout_s": (0.001, 86400),
    "output_bytes": (1, 1 << 30),
    "file_bytes": (0, 1 << 44),
    "open_files": (32, 65536),
    "threads": (1, 256),
    "tasks": (16, 32768),
}


def key_of(name: str) -> str:
    """Return the key of a record's field in function.yaml: its unit is in the value."""
    return "file_size" if name == "file_bytes" else re.sub(r"_(bytes|s)$", "", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerLimits:
    """The resource limits of one handler, with all that it starts.

    `cpu_s` is processor time within one call; `timeout_s` is the wall-clock limit of a call (a caller may
    request less). `output_bytes` bounds the whole output of one call. `threads` is the number of plain (not
    async) calls run at once, `tasks` that of processes and threads in all. `file_bytes` bounds each file,
    `open_files` each process.
    """

    memory_bytes: int = 1024 * _MIB
    cpu_s: float = 300.0
    timeout_s: float = 300.0
    output_bytes: int = 8 * _MIB
    file_bytes: int = 256 * _MIB
    open_files: int = 256
    threads: int = 4
    tasks: int = 512

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidRecord(f"limits.{key_of(name)} must be {low} to {high}, not {value}")

    def excess(self, ceilings: "HandlerLimits") -> str:
        """Return which limit is above its ceiling, in words, "" if none is."""
        for name in _BOUNDS:
            value, ceiling = getattr(self, name), getattr(ceilings, name)
            if value > ceiling:
                return f"limits.{key_of(name)}: {value} is above the ceiling of {ceiling}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSpec:
    """A user's own handler: `function` in `file`, relative to the function's folder.

    Without a file it is the built-in handler of that name. `secrets` are the names of those which it needs
    in its environment.
    """

    file: str
    function: str
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    limits: HandlerLimits = field(default_factory=HandlerLimits)

    @property
    def builtin(self) -> bool:
        return not self.file


def bad_env_name(name: str) -> str:
    """Return why a function may not set the environment variable, "" if it may."""
    if not _ENV_NAME.fullmatch(name):
        return "not a name for an environment variable"
    if _RESERVED_ENV.fullmatch(name):
        return "reserved, as it steers how programs are loaded or which files and devices they use"
    return ""
