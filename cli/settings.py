"""The gateway's address and key: from flags, then the environment, then the user's configuration file."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cli.errors import UsageError

DEFAULT_URL = "http://127.0.0.1:8000"
KNOWN_KEYS = {"url", "api_key", "ca_file"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Address and key of a gateway. Without `api_key` only open endpoints respond; a repr never shows it.

    `ca_file` has the authority of its certificate, None: the system's.
    """

    url: str
    api_key: str | None
    ca_file: Path | None = None

    def __repr__(self) -> str:
        return f"ClientSettings(url={self.url!r}, api_key={'set' if self.api_key else None})"


def config_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's configuration file."""
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "hypercast" / "config.toml"


def read_config(path: Path) -> dict[str, str]:
    """Return the settings in the configuration file, {} if there is none. Raises UsageError."""
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


def resolve(
    url: str | None,
    api_key: str | None,
    environ: Mapping[str, str] = os.environ,
    ca_file: Path | None = None,
) -> ClientSettings:
    """Return the settings: flags win over the environment, which wins over the configuration file."""
    config = read_config(config_path(environ))
    chosen = url or environ.get("HYPERCAST_URL") or config.get("url") or DEFAULT_URL
    if "://" not in chosen:
        chosen = f"http://{chosen}"
    key = api_key or environ.get("HYPERCAST_API_KEY") or config.get("api_key")
    # For example a key read from a file with CRLF line ends, which no header can carry.
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UsageError("the API key contains an invalid character; check it for a trailing line break")
    ca = ca_file or environ.get("HYPERCAST_CA_FILE") or config.get("ca_file")
    return ClientSettings(url=chosen.rstrip("/"), api_key=key, ca_file=Path(ca) if ca else None)
