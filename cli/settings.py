"""The gateway's address and key: from flags, then the environment, then the user's configuration file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cli.contexts import Config, Context, config_path, read_config
from cli.errors import UsageError

DEFAULT_URL = "http://127.0.0.1:8000"


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


def resolve(
    url: str | None,
    api_key: str | None,
    environ: Mapping[str, str] = os.environ,
    ca_file: Path | None = None,
    context: str | None = None,
) -> ClientSettings:
    """Return the settings: flags win over the environment, which wins over the configuration file.

    A named `context` is a flag: it wins over the environment's address and key. A context's key and authority
    are for its own address only, so that no gateway receives the key of another. Raises UsageError.
    """
    config = read_config(config_path(environ))
    of_environ = {} if context is not None else environ
    given = url or of_environ.get("HYPERCAST_URL")
    entry = chosen_context(config, context or environ.get("HYPERCAST_CONTEXT"))
    chosen = complete_url(given or entry.url or DEFAULT_URL)
    if entry.url and complete_url(entry.url) != chosen:
        entry = Context()
    key = api_key or of_environ.get("HYPERCAST_API_KEY") or entry.api_key or None
    ca = ca_file or of_environ.get("HYPERCAST_CA_FILE") or entry.ca_file
    return ClientSettings(url=chosen, api_key=checked_key(key), ca_file=Path(ca) if ca else None)


def chosen_context(config: Config, name: str | None) -> Context:
    """Return the context of a name, else the current one, else the file's own settings. Raises UsageError."""
    name = name or config.current
    if not name:
        return Context(url=config.url, api_key=config.api_key, ca_file=config.ca_file)
    if name not in config.contexts:
        known = ", ".join(sorted(config.contexts)) or "none"
        raise UsageError(f"there is no context {name!r}; contexts: {known} (`hypercast login URL` makes one)")
    return config.contexts[name]


def complete_url(url: str) -> str:
    """Return an address with its scheme and without a slash at its end."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


def checked_key(key: str | None) -> str | None:
    """Return the key. Raises UsageError for one that no header can carry.

    For example one read from a file with CRLF line ends.
    """
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UsageError("the API key contains an invalid character; check it for a trailing line break")
    return key
