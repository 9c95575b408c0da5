"""Where the gateway is and which key to use: flags, then environment, then the user's config file."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cli.errors import UsageError

DEFAULT_URL = "http://127.0.0.1:8000"
KNOWN_KEYS = {"url", "api_key"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """`api_key` may be None: then only open endpoints answer. It never appears in a repr."""

    url: str
    api_key: str | None

    def __repr__(self) -> str:
        return f"ClientSettings(url={self.url!r}, api_key={'set' if self.api_key else None})"


def config_path(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "hypercast" / "config.toml"


def read_config(path: Path) -> dict[str, str]:
    """The config file's settings, {} if there is none. Raises UsageError naming a bad key or line."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise UsageError(f"{path}: {exc}") from exc
    unknown = set(values) - KNOWN_KEYS
    if unknown:
        raise UsageError(f"{path}: unknown setting {sorted(unknown)[0]!r}; known are {sorted(KNOWN_KEYS)}")
    for name, value in values.items():
        if not isinstance(value, str):
            raise UsageError(f"{path}: {name} must be a string")
    return values


def resolve(url: str | None, api_key: str | None, environ: Mapping[str, str] = os.environ) -> ClientSettings:
    """Flags win over `HYPERCAST_URL` and `HYPERCAST_API_KEY`, which win over the config file."""
    config = read_config(config_path(environ))
    chosen = url or environ.get("HYPERCAST_URL") or config.get("url") or DEFAULT_URL
    if "://" not in chosen:
        chosen = f"http://{chosen}"
    key = api_key or environ.get("HYPERCAST_API_KEY") or config.get("api_key")
    # As one from a file with Windows' line ends; a header cannot carry it, and who says so shows it.
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UsageError("the API key has a character that no key has: see its end for a line break")
    return ClientSettings(url=chosen.rstrip("/"), api_key=key)
