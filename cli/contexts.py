"""The user's configuration file: contexts, each the address of a gateway with a key for it.

    current = "prod"

    [contexts.prod]
    url = "https://hypercast.example.org"
    api_key = "hc_…"
    ca_file = "/home/me/ca.crt"

Without contexts, or while none is current, `url`, `api_key` and `ca_file` at its top are used.
"""

import os
import re
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from cli.errors import UsageError

MAX_CONTEXTS = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class Context(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A gateway's address, the key for it and the authority of its certificate, "" each if not set."""

    url: str = ""
    api_key: str = ""
    ca_file: str = ""

    def __repr__(self) -> str:
        return f"Context(url={self.url!r}, api_key={'set' if self.api_key else None})"


class Config(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The content of the configuration file."""

    url: str = ""
    api_key: str = ""
    ca_file: str = ""
    current: str = ""
    contexts: dict[str, Context] = {}

    def __repr__(self) -> str:
        return f"Config(current={self.current!r}, contexts={sorted(self.contexts)})"


def config_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's configuration file."""
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "hypercast" / "config.toml"


def read_config(path: Path) -> Config:
    """Return the configuration file, an empty one if there is none. Raises UsageError."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return Config()
    try:
        return msgspec.toml.decode(text, type=Config)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # The parser's messages name lines and keys, never values.
        raise UsageError(f"{path}: {error}") from None


def check_context_name(name: str) -> str:
    """Return the name. Raises UsageError for one that is no context's."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a context: 1 to 64 letters, digits, '_', '.' and '-'")
    return name


def save_context(path: Path, name: str, context: Context) -> None:
    """Add or replace a context, and make it the current one. Raises UsageError, OSError."""
    config = read_config(path)
    if name not in config.contexts and len(config.contexts) >= MAX_CONTEXTS:
        raise UsageError(f"{path} has {MAX_CONTEXTS} contexts: delete one with `hypercast context delete`")
    _change(path, current=name, contexts={name: msgspec.to_builtins(context)})


def use_context(path: Path, name: str) -> None:
    """Make a context the current one; "" for none. Raises UsageError, OSError."""
    _change(path, current=name or None)


def delete_context(path: Path, name: str) -> None:
    """Remove a context with its key; if it was the current one, none is. Raises UsageError, OSError."""
    was_current = read_config(path).current == name
    _change(path, contexts={name: None}, **({"current": None} if was_current else {}))


def _change(
    path: Path, contexts: Mapping[str, Mapping[str, str] | None] | None = None, **values: str | None
) -> None:
    """Set values, or remove those that are None; what else the file has stays, comments included.

    The file is replaced at once, by one that its user alone can read. A link to it stays one.
    """
    import tomlkit  # here, as only these commands write the file

    path = path.resolve()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    document = tomlkit.parse(path.read_text()) if path.exists() else tomlkit.document()
    for key, value in values.items():
        _set(document, key, value)
    if contexts:
        table = document.setdefault("contexts", tomlkit.table(is_super_table=True))
        for name, context in contexts.items():
            _set(table, name, context)
    _replace(path, tomlkit.dumps(document))


def _set(table: MutableMapping[str, Any], key: str, value: object) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".config-")  # its mode is 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        Path(name).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise
