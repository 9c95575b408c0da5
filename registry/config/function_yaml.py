"""function.yaml: the declaration of a function, parsed strictly into frozen records.

name: echo                    # optional; `hypercast deploy --name` takes precedence
description: Returns the request.
task: handler                 # generate, embed, classify, features, handler; optional with a model
model: ./checkpoint           # a folder beside this file, an absolute path, or a hub id
dtype: float32
engine: vllm                  # native (the default) or vllm
engine_args: --max-model-len 4096 --enable-auto-tool-choice --tool-call-parser hermes
handler: handler.py:handle    # file and function, or builtin:echo; instead of a model
env: {GREETING: hello}
secrets: [API_TOKEN]          # names; the values are set with `hypercast secrets set`
limits: {memory: 512MiB, cpu: 60s, timeout: 5m, output: 8MiB, file_size: 64MiB, open_files: 256, threads: 4,
         tasks: 512}
scaling: {min_instances: 0, max_instances: 4, target_concurrency: 8, keep_alive: 60s, host_keep_alive: 1h,
          host_copies: 1, live: auto, policy: load, scale_down: start, ttft_target: 1s, tbt_target: 200ms,
          serving: colocated}
"""

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
import yaml

from registry.config.engine_args import check_vllm_args, split_engine_args
from registry.config.function_secrets import check_secret_key
from registry.config.handler_spec import HandlerLimits, HandlerSpec, bad_env_name, key_of
from registry.errors import InvalidRecord
from registry.records.engine import EngineKind
from registry.records.function import (
    BUILTIN_PREFIX,
    BUILTINS,
    FunctionTask,
    ScaleDown,
    Scaling,
    ScalingMode,
    ServingMode,
    check_name,
)
from registry.records.live import LiveMode
from registry.records.secret import MAX_SECRETS
from registry.units.durations import parse_duration
from registry.units.sizes import parse_size

FILE_NAME = "function.yaml"
MAX_FILE_BYTES = 64 * 1024
MAX_BRACKETS = 200

DType = Literal["auto", "float32", "float16", "bfloat16"]
DTYPES = frozenset(get_args(DType))

_MIB = 1024**2
_DEEP = re.compile(r"(?:[-?] +){20}")
_HANDLER = re.compile(r"(?P<file>[^:]+\.py):(?P<function>[A-Za-z_][A-Za-z0-9_]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """A parsed function.yaml. `task=None` leaves the task to the model's architecture.

    Either `handler` is set, or the function serves a model: `model`, or the one that deploy names.
    """

    name: str | None = None
    description: str = ""
    task: FunctionTask | None = None
    model: str | None = None
    dtype: str = "auto"
    handler: HandlerSpec | None = None
    engine: EngineKind | None = None
    engine_args: tuple[str, ...] = ()
    scaling: Scaling = field(default_factory=Scaling)
    given: frozenset[str] = field(default=frozenset(), compare=False)  # the settings of `scaling` that it has

    def model_folder(self, base: Path) -> Path | None:
        """Return the model's local folder, or None where `model` is a hub id or a URL (or absent)."""
        if self.model is None or "://" in self.model:
            return None
        path = base / self.model
        looks_like_path = self.model.startswith((".", "/", "~")) or self.model.count("/") > 1
        return path.expanduser() if looks_like_path or path.is_dir() else None


class SizeText(int):
    """A size: text such as 512MiB or 2GB, or a plain number of bytes."""


class DurationText(float):
    """A duration: text such as 90s, 5m or 1h, or a plain number of seconds."""


_Text = Annotated[str, msgspec.Meta(pattern=r"\S")]


def _section(record: type) -> type[msgspec.Struct]:
    """Return the section that fills a record: its fields, all optional, with units where it has them."""
    hints, units = get_type_hints(record), {"bytes": SizeText, "s": DurationText}
    names = [one.name for one in fields(record)]
    kinds = [(name, units.get(name.rpartition("_")[2], hints[name]) | None, None) for name in names]
    keys = {name: key_of(name) for name in names}
    return msgspec.defstruct(record.__name__, kinds, rename=keys, kw_only=True, forbid_unknown_fields=True)


_LimitsSection = _section(HandlerLimits)
_ScalingSection = _section(Scaling)


class _FunctionFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The keys of a function.yaml; a key without a value is absent."""

    name: _Text | None = None
    description: _Text | None = None
    task: FunctionTask | None = None
    model: _Text | None = None
    dtype: DType | None = None
    engine: EngineKind | None = None
    engine_args: str | list[str] | None = None
    handler: _Text | None = None
    env: dict[str, Any] | None = None
    secrets: list[Any] | None = None
    limits: _LimitsSection | None = None  # type: ignore[valid-type]
    scaling: _ScalingSection | None = None  # type: ignore[valid-type]


_SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "": _FunctionFile,
    "limits": _LimitsSection,
    "scaling": _ScalingSection,
}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "task": tuple(FunctionTask),
    "dtype": get_args(DType),
    "engine": tuple(EngineKind),
    "scaling.live": tuple(LiveMode),
    "scaling.policy": tuple(ScalingMode),
    "scaling.scale_down": tuple(ScaleDown),
    "scaling.serving": tuple(ServingMode),
}
_KINDS: Mapping[str, str] = {"str": "text", "int": "a whole number", "object": "a mapping"}


def load_function_yaml(folder: Path) -> FunctionSpec:
    """Read `folder`/function.yaml. Raises InvalidRecord with the file's name in the message."""
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
    """Parse the text of a function.yaml. Raises InvalidRecord naming the key of a bad value."""
    document = _parse_yaml(text)
    try:
        file = msgspec.convert(document, _FunctionFile, dec_hook=_decode_quantity)
    except msgspec.ValidationError as error:
        raise InvalidRecord(_explained(error, document)) from None
    handler = _handler(file)
    if handler is not None and file.model is not None:
        raise InvalidRecord("model: a function has either a model or a handler")
    if handler is not None and file.task not in (None, FunctionTask.HANDLER):
        raise InvalidRecord(
            f"task: a function with a handler has the task 'handler', not {file.task.value!r}"
        )
    if handler is None and file.task is FunctionTask.HANDLER:
        raise InvalidRecord("handler: missing; the task 'handler' needs it, such as handler.py:handle")
    if handler is None and file.task is None and file.model is None:
        raise InvalidRecord("give a model, a task or a handler")
    try:
        settings = _settings(file.scaling)
        scaling = Scaling(**settings)
    except InvalidRecord as error:
        raise InvalidRecord(f"scaling: {error}") from error
    return FunctionSpec(
        name=check_name(file.name) if file.name is not None else None,
        description=file.description or "",
        task=FunctionTask.HANDLER if handler is not None else file.task,
        model=file.model,
        dtype=file.dtype or "auto",
        handler=handler,
        engine=file.engine,
        engine_args=_engine_args(file),
        scaling=scaling,
        given=frozenset(settings),
    )


def _engine_args(file: _FunctionFile) -> tuple[str, ...]:
    if file.engine_args is None:
        if file.engine is not None and file.handler is not None:
            raise InvalidRecord("engine: a function with a handler has none")
        return ()
    if file.engine is not EngineKind.VLLM:
        raise InvalidRecord("engine_args: only a function with the engine vllm has this")
    given = file.engine_args
    return check_vllm_args(split_engine_args(given) if isinstance(given, str) else given)


def parse_handler_limits(text: str, defaults: HandlerLimits) -> HandlerLimits:
    """Parse limits such as "memory: 8GiB, cpu: 1h", over `defaults`. Raises InvalidRecord."""
    document = _parse_yaml(f"limits: {{{text}}}")
    try:
        file = msgspec.convert(document, _FunctionFile, dec_hook=_decode_quantity)
    except msgspec.ValidationError as error:
        raise InvalidRecord(_explained(error, document)) from None
    return replace(defaults, **_settings(file.limits))


def keys_of_file() -> Iterator[tuple[str, object]]:
    """Yield each key of a function.yaml, such as scaling.keep_alive, with the type of its value."""
    for section, struct in _SECTIONS.items():
        hints = get_type_hints(struct)
        for name, key in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True):
            if key not in _SECTIONS:
                yield f"{section}.{key}".lstrip("."), hints[name]


def choices_of(key: str) -> tuple[str, ...]:
    """Return the values that a key may have, () where others than named ones are possible."""
    return _CHOICES.get(key, ())


def scaling_keys() -> tuple[str, ...]:
    """Return the keys of the section `scaling`."""
    return _ScalingSection.__struct_encode_fields__


def parse_scaling(given: Mapping[str, str]) -> dict[str, Any]:
    """Parse settings of `scaling` by key, such as {"keep_alive": "5m"}; return those of a Scaling.

    Whether they fit each other and the function is not checked. Raises InvalidRecord.
    """
    document = {"scaling": {key: _parse_yaml(text) for key, text in given.items()}}
    try:
        file = msgspec.convert(document, _FunctionFile, dec_hook=_decode_quantity)
    except msgspec.ValidationError as error:
        raise InvalidRecord(_explained(error, document).replace("scaling.", "")) from None
    settings = _settings(file.scaling)
    if len(settings) < len(given):
        raise InvalidRecord("a setting has no value")
    return settings


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader with unique text keys, and with the booleans of YAML 1.2: `on` and `off` are text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise InvalidRecord(f"{_shown(key)}: a key must be text (line {line})")
            if key in seen:
                raise InvalidRecord(f"{key}: given twice (line {line})")
            seen.add(key)
        return super().construct_mapping(node, deep)


_BOOL_TAG = "tag:yaml.org,2002:bool"
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL_TAG]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(
    _BOOL_TAG, re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _parse_yaml(text: str | bytes) -> object:
    if len(text) > MAX_FILE_BYTES:
        raise InvalidRecord(f"too large for a {FILE_NAME}: at most {MAX_FILE_BYTES} bytes")
    plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
    if plain.count("[") + plain.count("{") > MAX_BRACKETS or _DEEP.search(plain):
        raise InvalidRecord("nested too deeply")  # the cost of parsing grows with the square of the depth
    try:
        # _StrictLoader derives from SafeLoader: plain data only.
        return yaml.load(text, Loader=_StrictLoader)
    except InvalidRecord:
        raise
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, RecursionError) as error:
        # Tags such as !!int or dates raise the exceptions of Python's own conversions.
        raise InvalidRecord(f"not valid YAML: {error}") from error


def _decode_quantity(kind: type, value: object) -> object:
    """Convert a value of a `SizeText` or `DurationText` field. Raises ValueError."""
    parse: Callable[[str], float] = parse_size if kind is SizeText else parse_duration
    if isinstance(value, str):
        try:
            value = parse(value)
        except InvalidRecord as error:
            raise ValueError(str(error)) from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise ValueError(f"{_shown(value)} is not a number with a unit")
    return kind(value)


def _explained(error: msgspec.ValidationError, document: object) -> str:
    """Return the error with the key's name, the offending value and the allowed values or keys."""
    message, _, path = str(error).partition(" - at `$")
    where = path.rstrip("`").removeprefix(".")
    value = document
    for key in where.split(".") if where else ():
        assert isinstance(value, dict)
        value = value[key]
    if unknown := re.match(r"Object contains unknown field `(.*)`", message, re.DOTALL):
        name = f"{where}.{unknown[1]}" if where else unknown[1]
        return (
            f"{name}: unknown key; known are {', '.join(sorted(_SECTIONS[where].__struct_encode_fields__))}"
        )
    if where in _CHOICES:
        return f"{where}: {_shown(value)} is not one of {', '.join(_CHOICES[where])}"
    if expected := re.match(r"Expected `(\w+)", message):
        noun = _KINDS.get(expected[1], expected[1])
        found = _shown(value) if isinstance(value, bool | int | float) else _kind(value)
        return f"{where or FILE_NAME}: must be {noun}, not {found}"
    return f"{where}: {message}"


def _kind(value: object) -> str:
    empty = value is None or (isinstance(value, str) and not value.strip())
    return "empty" if empty else type(value).__name__


def _shown(value: object) -> str:
    """Return a scalar as it was written; for anything else only its kind, since aliases can make it huge."""
    return repr(value)[:80] if isinstance(value, str | int | float) else _kind(value)


def _settings(section: msgspec.Struct | None) -> dict[str, Any]:
    """Return the given settings of a section, as arguments of its record."""
    if section is None:
        return {}
    given = {name: getattr(section, name) for name in section.__struct_fields__}
    plain: dict[type, Callable[[Any], object]] = {SizeText: int, DurationText: float}
    return {
        name: plain.get(type(value), lambda same: same)(value)
        for name, value in given.items()
        if value is not None
    }


def _handler(file: _FunctionFile) -> HandlerSpec | None:
    if file.handler is None:
        for key in ("env", "secrets", "limits"):
            if getattr(file, key) is not None:
                raise InvalidRecord(f"{key}: only a function with a handler has this")
        return None
    if file.handler.startswith(BUILTIN_PREFIX):
        name = file.handler.removeprefix(BUILTIN_PREFIX)
        if name not in BUILTINS:
            raise InvalidRecord(f"handler: no built-in {name!r}: use {', '.join(sorted(BUILTINS))}")
        return HandlerSpec(file="", function=name)
    match = _HANDLER.fullmatch(file.handler.strip())
    if match is None:
        raise InvalidRecord(f"handler: {file.handler!r} must be FILE.py:FUNCTION, such as handler.py:handle")
    path = PurePosixPath(match["file"])
    if path.is_absolute() or ".." in path.parts:
        raise InvalidRecord(f"handler: {match['file']!r} must be inside the function's folder")
    return HandlerSpec(
        file=str(path),
        function=match["function"],
        env=_env(file.env or {}),
        secrets=_secrets(file.secrets or [], file.env or {}),
        limits=HandlerLimits(**_settings(file.limits)),
    )


def _secrets(keys: Sequence[object], env: Mapping[str, object]) -> tuple[str, ...]:
    if len(keys) > MAX_SECRETS:
        raise InvalidRecord(f"secrets: at most {MAX_SECRETS}")
    known = list[str]()
    for key in keys:
        try:
            known.append(check_secret_key(str(key)))
        except InvalidRecord as error:
            raise InvalidRecord(f"secrets: {error}") from None
        if key in env:
            raise InvalidRecord(f"env.{key}: is also among the secrets")
    if len(set(known)) < len(known):
        raise InvalidRecord("secrets: a name is given twice")
    return tuple(sorted(known))


def _env(values: Mapping[str, object]) -> Mapping[str, str]:
    for name, value in values.items():
        if reason := bad_env_name(name):
            raise InvalidRecord(f"env.{name}: {reason}")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise InvalidRecord(f"env.{name}: must be text, not {_kind(value)}; put it in quotes")
        if "\0" in str(value):
            raise InvalidRecord(f"env.{name}: contains a NUL character")
    return {name: str(value) for name, value in values.items()}
