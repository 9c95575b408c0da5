"""function.yaml: what a function folder declares, parsed strictly into frozen records.

name: echo                    # optional; `hypercast deploy --name` has the last word
description: Sends back what it got.
task: handler                 # generate, embed, classify, features, handler; optional with a model
model: ./checkpoint           # a folder beside this file, an absolute path, or a hub id
dtype: float32
handler: handler.py:handle    # file and function, or builtin:echo; instead of a model
env: {GREETING: hello}
limits: {memory: 512MiB, cpu: 60s, timeout: 5m, output: 8MiB, file_size: 64MiB, open_files: 256, threads: 4}
scaling: {min_instances: 0, max_instances: 4, target_concurrency: 8, keep_alive: 60s, host_keep_alive: 1h,
          live: auto, ttft_target: 1s}
"""

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from registry.durations import parse_duration
from registry.errors import InvalidRecord
from registry.function import BUILTIN_PREFIX, BUILTINS, Scaling, Task, check_name
from registry.live import Live
from registry.sizes import parse_size

FILE_NAME = "function.yaml"
MAX_FILE_BYTES = 64 * 1024
MAX_BRACKETS = 200

DTYPES = frozenset({"auto", "float32", "float16", "bfloat16"})

_MIB = 1024**2
_DEEP = re.compile(r"(?:[-?] +){20}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HANDLER = re.compile(r"(?P<file>[^:]+\.py):(?P<function>[A-Za-z_][A-Za-z0-9_]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerLimits:
    """What one handler process may use.

    `cpu_s` is processor time within one call; `timeout_s` is the wall-clock limit of a call (a caller
    may ask for less). `output_bytes` bounds everything one call returns. `threads` is how many plain
    (not async) calls run at once.
    """

    memory_bytes: int = 1024 * _MIB
    cpu_s: float = 300.0
    timeout_s: float = 300.0
    output_bytes: int = 8 * _MIB
    file_bytes: int = 256 * _MIB
    open_files: int = 256
    threads: int = 4

    def __post_init__(self) -> None:
        bounds: tuple[tuple[str, float, float, float], ...] = (
            ("memory", self.memory_bytes, 16 * _MIB, 1 << 44),
            ("cpu", self.cpu_s, 1, 86400),
            ("timeout", self.timeout_s, 0.001, 86400),
            ("output", self.output_bytes, 1, 1 << 30),
            ("file_size", self.file_bytes, 0, 1 << 44),
            ("open_files", self.open_files, 32, 65536),
            ("threads", self.threads, 1, 256),
        )
        for name, value, low, high in bounds:
            if not low <= value <= high:
                raise InvalidRecord(f"limits.{name} must be {low} to {high}, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSpec:
    """A user's own code: `function` in `file` (a path relative to the function's folder); or, without
    a file, the handler of that name that nodes bring themselves."""

    file: str
    function: str
    env: Mapping[str, str] = field(default_factory=dict)
    limits: HandlerLimits = field(default_factory=HandlerLimits)

    @property
    def builtin(self) -> bool:
        return not self.file


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """A parsed function.yaml. `task=None` leaves the task to the model's architecture.

    Either `handler` is set, or the function serves a model: `model`, or the one that deploy is given.
    """

    name: str | None = None
    description: str = ""
    task: Task | None = None
    model: str | None = None
    dtype: str = "auto"
    handler: HandlerSpec | None = None
    scaling: Scaling = field(default_factory=Scaling)

    def model_folder(self, base: Path) -> Path | None:
        """The model's folder on this machine, or None where `model` is a hub id (or absent)."""
        if self.model is None:
            return None
        path = base / self.model
        looks_like_path = self.model.startswith((".", "/", "~")) or self.model.count("/") > 1
        return path.expanduser() if looks_like_path or path.is_dir() else None


def load_function_yaml(folder: Path) -> FunctionSpec:
    """Read `folder`/function.yaml; raises InvalidRecord with the file's name in the message."""
    path = folder / FILE_NAME
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InvalidRecord(f"{path}: {size} bytes is too large for a {FILE_NAME}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRecord(f"{path}: cannot be read: {error}") from error
    try:
        return parse_function_yaml(text)
    except InvalidRecord as error:
        raise InvalidRecord(f"{path}: {error}") from error


def parse_function_yaml(text: str | bytes) -> FunctionSpec:
    """Parse the text of a function.yaml; unknown keys and bad values raise InvalidRecord naming the key."""
    if len(text) > MAX_FILE_BYTES:
        raise InvalidRecord(f"too large for a {FILE_NAME}")
    plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
    if plain.count("[") + plain.count("{") > MAX_BRACKETS or _DEEP.search(plain):
        raise InvalidRecord("nests too deep")  # what it costs to parse grows with the square of the depth
    try:
        # _StrictLoader derives from SafeLoader: plain data only.
        document = yaml.load(text, Loader=_StrictLoader)
    except InvalidRecord:
        raise
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, RecursionError) as error:
        # Its constructors let what Python's own conversions raise pass, for tags such as !!int or dates.
        raise InvalidRecord(f"not valid YAML: {error}") from error
    top = _mapping(
        document,
        "",
        {"name", "description", "task", "model", "dtype", "handler", "env", "limits", "scaling"},
    )
    task = _task(top.get("task"))
    model = _optional_text(top, "model")
    handler = _handler(top)
    if handler is not None and model is not None:
        raise InvalidRecord("model: a function has either a model or a handler")
    if handler is not None and task not in (None, Task.HANDLER):
        raise InvalidRecord(f"task: a function with a handler has the task 'handler', not {task.value!r}")
    if handler is None and task is Task.HANDLER:
        raise InvalidRecord("handler: missing; the task 'handler' needs it, such as handler.py:handle")
    if handler is None and task is None and model is None:
        raise InvalidRecord("give a model, a task or a handler")
    dtype = _optional_text(top, "dtype") or "auto"
    if dtype not in DTYPES:
        raise InvalidRecord(f"dtype: {dtype!r} is not one of {', '.join(sorted(DTYPES))}")
    name = _optional_text(top, "name")
    return FunctionSpec(
        name=check_name(name) if name is not None else None,
        description=_optional_text(top, "description") or "",
        task=Task.HANDLER if handler is not None else task,
        model=model,
        dtype=dtype,
        handler=handler,
        scaling=_scaling(top.get("scaling")),
    )


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise InvalidRecord(f"{key}: given twice (line {key_node.start_mark.line + 1})")
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep)


def _mapping(value: object, where: str, allowed: set[str]) -> Mapping[str, object]:
    """`value` as a mapping with known keys only."""
    if not isinstance(value, dict):
        raise InvalidRecord(f"{where or FILE_NAME}: must be a mapping, not {_kind(value)}")
    for key in value:
        if key not in allowed:
            name = f"{where}.{key}" if where else str(key)
            raise InvalidRecord(f"{name}: unknown key; known are {', '.join(sorted(allowed))}")
    return value


def _kind(value: object) -> str:
    return "empty" if value is None else type(value).__name__


def _shown(value: object) -> str:
    """A scalar as it was given; of anything else only its kind, since aliases can make it huge."""
    return repr(value)[:80] if isinstance(value, str | int | float) else _kind(value)


def _optional_text(top: Mapping[str, object], key: str) -> str | None:
    value = top.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise InvalidRecord(f"{key}: must be text, not {_kind(value)}")
    return value


def _task(value: object) -> Task | None:
    if value is None:
        return None
    known = {task.value: task for task in Task}
    if not isinstance(value, str) or value not in known:
        raise InvalidRecord(f"task: {_shown(value)} is not one of {', '.join(known)}")
    return known[value]


def _handler(top: Mapping[str, object]) -> HandlerSpec | None:
    value = _optional_text(top, "handler")
    if value is None:
        for key in ("env", "limits"):
            if key in top:
                raise InvalidRecord(f"{key}: only a function with a handler has this")
        return None
    if value.startswith(BUILTIN_PREFIX):
        name = value.removeprefix(BUILTIN_PREFIX)
        if name not in BUILTINS:
            raise InvalidRecord(f"handler: no built-in {name!r}; there is {', '.join(sorted(BUILTINS))}")
        return HandlerSpec(file="", function=name)
    match = _HANDLER.fullmatch(value.strip())
    if match is None:
        raise InvalidRecord(f"handler: {value!r} must be FILE.py:FUNCTION, such as handler.py:handle")
    file = PurePosixPath(match["file"])
    if file.is_absolute() or ".." in file.parts:
        raise InvalidRecord(f"handler: {match['file']!r} must lie inside the function's folder")
    return HandlerSpec(
        file=str(file),
        function=match["function"],
        env=_env(top.get("env")),
        limits=_limits(top.get("limits")),
    )


def _env(value: object) -> Mapping[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRecord(f"env: must be a mapping, not {_kind(value)}")
    env: dict[str, str] = {}
    for name, text in value.items():
        if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
            raise InvalidRecord(f"env.{name}: not a name for an environment variable")
        if isinstance(text, bool) or not isinstance(text, str | int | float):
            raise InvalidRecord(f"env.{name}: must be text, not {_kind(text)}; put it in quotes")
        if "\0" in str(text):
            raise InvalidRecord(f"env.{name}: contains a NUL character")
        env[name] = str(text)
    return env


def _limits(value: object) -> HandlerLimits:
    if value is None:
        return HandlerLimits()
    parsers: dict[str, tuple[str, Callable[[object, str], object]]] = {
        "memory": ("memory_bytes", _size_bytes),
        "cpu": ("cpu_s", _duration_s),
        "timeout": ("timeout_s", _duration_s),
        "output": ("output_bytes", _size_bytes),
        "file_size": ("file_bytes", _size_bytes),
        "open_files": ("open_files", _whole),
        "threads": ("threads", _whole),
    }
    return HandlerLimits(**_parse_all(_mapping(value, "limits", set(parsers)), "limits", parsers))


def _scaling(value: object) -> Scaling:
    if value is None:
        return Scaling()
    parsers: dict[str, tuple[str, Callable[[object, str], object]]] = {
        "min_instances": ("min_instances", _whole),
        "max_instances": ("max_instances", _whole),
        "target_concurrency": ("target_concurrency", _whole),
        "keep_alive": ("keep_alive_s", _duration_s),
        "host_keep_alive": ("host_keep_alive_s", _duration_s),
        "live": ("live", _live),
        "ttft_target": ("ttft_target_s", _duration_s),
    }
    try:
        return Scaling(**_parse_all(_mapping(value, "scaling", set(parsers)), "scaling", parsers))
    except InvalidRecord as error:
        raise InvalidRecord(f"scaling: {error}") from error


def _parse_all(
    given: Mapping[str, object],
    where: str,
    parsers: Mapping[str, tuple[str, Callable[[object, str], object]]],
) -> dict[str, Any]:
    """Each given value through its parser, under the name of the record's field."""
    parsed: dict[str, Any] = {}
    for key, value in given.items():
        name, parse = parsers[key]
        if value is not None:
            parsed[name] = parse(value, f"{where}.{key}")
    return parsed


def _whole(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRecord(f"{where}: must be a whole number, not {_shown(value)}")
    return value


def _live(value: object, where: str) -> Live:
    if value is False:  # YAML 1.1 reads a plain `off` so
        return Live.OFF
    known = {live.value: live for live in Live}
    if not isinstance(value, str) or value not in known:
        raise InvalidRecord(f"{where}: {_shown(value)} is not one of {', '.join(known)}")
    return known[value]


def _duration_s(value: object, where: str) -> float:
    """Seconds, from text such as 90s, 5m or 1h, or from a plain number."""
    return _quantity(value, where, parse_duration)


def _size_bytes(value: object, where: str) -> int:
    """Bytes, from text such as 512MiB or 2GB, or from a plain number."""
    return int(_quantity(value, where, parse_size))


def _quantity(value: object, where: str, parse: Callable[[str], float]) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18:
        return float(value)
    if not isinstance(value, str):
        raise InvalidRecord(f"{where}: {_shown(value)} is not a number with a unit")
    try:
        return parse(value)
    except InvalidRecord as error:
        raise InvalidRecord(f"{where}: {error}") from None
