"""`login`: keep a gateway's address and a key for it, as a context."""

import ipaddress
import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from cli.client import Client
from cli.contexts import Context, check_context_name, config_path, save_context
from cli.errors import AuthError, UsageError
from cli.options import output_option
from cli.output import emit_record
from cli.progress import note
from cli.settings import ClientSettings, checked_key, complete_url

MAX_KEY_CHARACTERS = 1024
OVERRIDES = ("HYPERCAST_URL", "HYPERCAST_API_KEY", "HYPERCAST_CONTEXT")


@click.command("login")
@click.argument("url")
@click.option("--name", help="Name of the context.  [default: the host of the address]")
@click.option(
    "--ca",
    "ca_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Authority of an https:// gateway's certificate.",
)
@output_option
def login_command(url: str, name: str | None, ca_file: Path | None, form: str) -> None:
    """Check an API key with a gateway and keep both as a context, which becomes the current one.

    Asks for the key, or reads it from stdin where that is no terminal. It is kept in
    ~/.config/hypercast/config.toml, which only you can read, and is sent to this address alone.

    \b
    Examples:
      hypercast login https://hypercast.example.org
      hypercast login http://127.0.0.1:8000 --name local < ./data/admin.key
    """
    address = complete_url(url)
    chosen = check_context_name(name or default_name(address))
    settings = ClientSettings(url=address, api_key=read_key(address), ca_file=ca_file)
    if is_readable_on_the_way(address):
        note(f"warning: {address} is not https: others on the network may read the key")
    with Client(settings, timeout_s=30.0) as client:
        key = client.json("GET", "/admin/me")
    ca = str(ca_file.resolve()) if ca_file is not None else ""
    path = config_path(os.environ)
    save_context(path, chosen, Context(url=address, api_key=settings.api_key or "", ca_file=ca))
    if form in ("json", "csv"):
        emit_record({"name": chosen, "url": address, "role": key["role"], "tenant": key["tenant"]}, form)
    note(f"{chosen}: {address}, {key['role']} of tenant {key['tenant']}; kept in {path}")
    warn_of_environment()


def read_key(address: str) -> str:
    """Return the key that the user enters, or that stdin has. Raises UsageError, AuthError."""
    if sys.stdin.isatty():
        text = click.prompt(f"API key for {address}", hide_input=True, err=True)
    else:
        text = sys.stdin.read(MAX_KEY_CHARACTERS + 1)
        if len(text) > MAX_KEY_CHARACTERS:
            raise UsageError("stdin has more than an API key")
    key = checked_key(text.strip())
    if not key:
        raise AuthError("there is no API key on stdin: `hypercast login URL < KEY_FILE`")
    return key


def default_name(address: str) -> str:
    """Return a name made of the address: its host, with the port where one is given. Raises UsageError."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"bad address {address!r}: {error}") from error
    if not host:
        raise UsageError(f"bad address {address!r}: it names no host")
    return re.sub(r"[^A-Za-z0-9_.-]", "-", host if port is None else f"{host}-{port}").strip("-.")[:64]


def is_readable_on_the_way(address: str) -> bool:
    """Return whether a key is sent to the address over a network, and not encrypted."""
    parts = urlsplit(address)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return False
    try:
        return not ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return True


def warn_of_environment() -> None:
    """Note where the environment wins over the current context."""
    if given := [name for name in OVERRIDES if os.environ.get(name)]:
        note(f"warning: {', '.join(given)} of the environment wins over the current context")
