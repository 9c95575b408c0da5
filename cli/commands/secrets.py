"""`secrets`: values that a function's handler gets as environment, encrypted at rest and never shown."""

import sys
from pathlib import Path

import click

from cli.client import Client, segment
from cli.completion import function_names
from cli.errors import MissingError, UsageError
from cli.options import client_options, output_option
from cli.output import emit_record, emit_rows
from cli.progress import note
from cli.tables import Column
from cli.values import age_of, human_bytes
from registry.records.secret import MAX_SECRET_BYTES

FIELDS = ("key", "bytes", "set_at")
COLUMNS = (
    Column(field="key"),
    Column(field="bytes", heading="SIZE", numeric=True, shown=lambda row: human_bytes(row["bytes"])),
    Column(field="set_at", heading="AGE", numeric=True, shown=lambda row: age_of(row["set_at"])),
)


@click.group("secrets")
def secrets_command() -> None:
    """Set, list and delete secrets of functions. No command shows a value again.

    A handler gets those that its function.yaml names under `secrets:`, as environment.

    \b
    Examples:
      hypercast secrets set chat API_TOKEN < token.txt
      hypercast secrets list chat
    """


@secrets_command.command("set")
@click.argument("name", shell_complete=function_names)
@click.argument("key")
@click.option(
    "--from-file",
    type=click.Path(path_type=Path),
    help="Read the value from a file.  [default: standard input]",
)
@output_option
@client_options
def set_secret(name: str, key: str, from_file: Path | None, form: str, client: Client) -> None:
    """Set or replace a secret. One line break at the end of the value is removed.

    On a terminal it asks for the value without showing it. Instances that start from now on have it;
    `hypercast scale NAME --instances 0` ends those which run, and the next call starts new ones.

    \b
    Examples:
      hypercast secrets set chat API_TOKEN
      hypercast secrets set chat TLS_KEY --from-file key.pem
    """
    made = client.json("PUT", path_of(name, key), json={"value": read_value(from_file)})
    if form in ("json", "csv"):
        emit_record(made, form)
    note(f"set {key} of {name}, for instances that start from now on")


def read_value(from_file: Path | None) -> str:
    """Return the value of a file, else of the terminal without echo, else of standard input."""
    if from_file is None and sys.stdin.isatty():
        return str(click.prompt("Value", hide_input=True, err=True))
    if from_file is not None:
        try:
            with from_file.open("rb") as file:
                raw = file.read(MAX_SECRET_BYTES + 3)
        except OSError as exc:
            raise MissingError(f"cannot read {from_file}: {exc.strerror}") from exc
    else:
        raw = sys.stdin.buffer.read(MAX_SECRET_BYTES + 3)
    try:
        value = raw.decode()
    except UnicodeDecodeError:
        raise UsageError("a secret must be UTF-8 text: encode other bytes, with base64 for example") from None
    value = value.removesuffix("\n").removesuffix("\r")
    if not 1 <= len(value.encode()) <= MAX_SECRET_BYTES:
        raise UsageError(f"a secret has 1 to {MAX_SECRET_BYTES} bytes")
    return value


@secrets_command.command("list")
@click.argument("name", shell_complete=function_names)
@output_option
@client_options
def list_secrets(name: str, form: str, client: Client) -> None:
    """List the names of a function's secrets, with sizes and times.

    \b
    Example:
      hypercast secrets list chat
    """
    emit_rows(client.json("GET", path_of(name))["secrets"], COLUMNS, FIELDS, form)


@secrets_command.command("delete")
@click.argument("name", shell_complete=function_names)
@click.argument("key")
@output_option
@client_options
def delete(name: str, key: str, form: str, client: Client) -> None:
    """Delete a secret that the function's current version does not need.

    \b
    Example:
      hypercast secrets delete chat API_TOKEN
    """
    gone = client.json("DELETE", path_of(name, key))
    if form in ("json", "csv"):
        emit_record(gone, form)
    note(f"deleted {key} of {name}")


@secrets_command.command("reencrypt")
@output_option
@client_options
def reencrypt(form: str, client: Client) -> None:
    """Encrypt the secrets of all functions with the newest cluster secret, before the old one is removed.

    \b
    Example:
      hypercast secrets reencrypt
    """
    done = client.json("POST", "/admin/secrets/reencrypt")
    if form in ("json", "csv"):
        emit_record(done, form)
    note(f"{len(done['reencrypted'])} secrets encrypted anew")
    for one in done["unreadable"]:
        note(f"warning: {one} was encrypted with a cluster secret that is gone: set it again")


def path_of(name: str, key: str | None = None) -> str:
    """Return the path of a function's secrets, or of one."""
    path = f"/admin/functions/{segment(name)}/secrets"
    return path if key is None else f"{path}/{segment(key)}"
