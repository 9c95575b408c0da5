"""The page of all settings: flags of processes, function.yaml, the environment, the configuration file."""

from dataclasses import fields
from types import UnionType
from typing import Any, get_args

from cli.contexts import Config, Context
from cli.reference.markdown import block, code, prose, table
from cli.values import duration, human_bytes
from gateway.core.settings import COMMAND as GATEWAY
from invoker.settings import COMMAND as INVOKER
from registry.config.command_line import process_command
from registry.config.function_yaml import DurationText, SizeText, choices_of, keys_of_file
from registry.config.function_yaml_help import FUNCTION_YAML_HELP
from registry.config.handler_spec import HandlerLimits, key_of
from registry.config.option_types import PlatformCommand
from registry.config.options import FLAGS
from registry.config.secrets import REDIS_PASSWORD_VARIABLE, SECRET_VARIABLE
from registry.records.function import Scaling

_HEAD = """\
# Settings

Every setting, from the code that parses it. Durations are written `90s`, `5m`, `1h30m`, `250ms`; sizes
`512MiB`, `2GB`; rates `200mbit`, `100MB/s`. How they work together: [Operations](../docs/OPERATIONS.md).

"""
_FLAGS_HEAD = """\
## Processes

Flags of `hypercast up`, which starts gateways and nodes on one machine, of `hypercast gateway` and of
`hypercast invoker`. `up` passes its flags on to the gateways and nodes that it starts.

"""
_FILE_HEAD = """\
## function.yaml

The declaration of a function, beside its model or handler. Unknown keys and wrong types are refused. The
keys of `scaling` are also those of `hypercast set`, with dashes. [What they
do](../docs/OPERATIONS.md#scaling).

"""
_ENVIRONMENT = (
    ("HYPERCAST_URL", "the command line", "Address of the gateway."),
    ("HYPERCAST_API_KEY", "the command line", "API key."),
    ("HYPERCAST_CA_FILE", "the command line", "Authority of an `https://` gateway's certificate."),
    ("HYPERCAST_CONTEXT", "the command line", "Context of `hypercast login` to use."),
    (SECRET_VARIABLE, "gateway, invoker", "The cluster's secret, instead of a file."),
    (REDIS_PASSWORD_VARIABLE, "up, gateway, invoker", "Password of Redis, instead of a file."),
)
_CONFIG_HEAD = """\
## The configuration file

`~/.config/hypercast/config.toml` (or below `$XDG_CONFIG_HOME`), which `hypercast login` and `hypercast
context` write. The environment takes precedence, and flags over both.

"""
_WORDS = {str: "text", int: "whole number", float: "number", dict: "mapping", list: "list"}


def settings_page() -> str:
    """Return the page."""
    return (
        _HEAD
        + _FLAGS_HEAD
        + table(("flag", "value", "of", "default", "meaning"), map(_flag_row, FLAGS))
        + _FILE_HEAD
        + table(("key", "value", "default", "meaning"), map(_key_row, keys_of_file()))
        + "## Environment\n\n"
        + table(("variable", "of", "meaning"), ((code(name), of, text) for name, of, text in _ENVIRONMENT))
        + _CONFIG_HEAD
        + block(_config_example(), "toml")
    )


def _flag_row(name: str) -> tuple[str, ...]:
    flag = FLAGS[name]
    defaults = {command.value: _default(name, command) for command in flag.commands}
    default = next(iter(defaults.values()))
    if len(set(defaults.values())) > 1:
        default = "; ".join(f"{command}: {value}" for command, value in defaults.items())
    kind = flag.metavar or (flag.type.name if flag.type is not None else "")
    choices = getattr(flag.type, "choices", ())
    value = ", ".join(map(code, choices)) or prose(kind)
    return code(flag.name), value, ", ".join(defaults), default, prose(flag.help)


def _default(name: str, command: PlatformCommand) -> str:
    """Return the default as the help of the command shows it."""
    parser = {PlatformCommand.GATEWAY: GATEWAY, PlatformCommand.INVOKER: INVOKER}.get(command)
    parser = parser or process_command(command, "")
    option = next(one for one in parser.params if one.name == name)
    text = getattr(option, "help", "") or ""
    if option.required:
        return "required"
    if "[default: " in text:
        return prose(text.rpartition("[default: ")[2].rstrip("]"))
    return "off" if getattr(option, "is_flag", False) else "none"


def _key_row(one: tuple[str, object]) -> tuple[str, str, str, str]:
    key, hint = one
    given, text = FUNCTION_YAML_HELP[key]
    value = ", ".join(map(code, choices_of(key))) or _value(hint)
    return code(key), value, given or _record_default(key) or "none", text


def _value(hint: object) -> str:
    kinds = [one for one in (get_args(hint) if isinstance(hint, UnionType) else _union(hint)) if one]
    shown = []
    for kind in kinds:
        if kind is type(None):
            continue
        if kind is SizeText:
            shown.append("size")
        elif kind is DurationText:
            shown.append("duration")
        else:
            base = getattr(kind, "__origin__", kind)
            shown.append(_WORDS.get(base, "text"))
    return " or ".join(shown)


def _union(hint: object) -> tuple[Any, ...]:
    return get_args(hint) or (hint,)


def _record_default(key: str) -> str:
    """Return the default of a key of a section, with its unit."""
    section, _, name = key.partition(".")
    record: HandlerLimits | Scaling = HandlerLimits() if section == "limits" else Scaling()
    if not name:
        return ""
    field = next(one.name for one in fields(record) if key_of(one.name) == name)
    value = getattr(record, field)
    if field.endswith("_bytes"):
        return human_bytes(value)
    return duration(value) if field.endswith("_s") else str(value)


def _config_example() -> str:
    """Return a file with every field that it may have."""
    top = [name for name in Config.__struct_fields__ if name not in ("contexts", "current")]
    lines = [*(f'{name} = "…"' for name in top), 'current = "NAME"', "", "[contexts.NAME]"]
    return "\n".join([*lines, *(f'{name} = "…"' for name in Context.__struct_fields__)])
