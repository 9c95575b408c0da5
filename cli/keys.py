"""`keys`: who may call."""

import json

import click

from cli.client import segment
from cli.options import DURATION, client_options, connect, output_option
from cli.output import emit_record, emit_rows
from cli.progress import note

COLUMNS = ("id", "name", "tenant", "role", "functions", "created_at", "expires_at", "revoked_at")


@click.group("keys")
def keys_command() -> None:
    """Make, list and revoke API keys. Only a hash of a key is kept."""


@keys_command.command("create")
@click.option("--tenant", default="default", show_default=True, help="Who pays.")
@click.option("--name", default="", help="What it is for.")
@click.option("--role", type=click.Choice(["caller", "admin"]), default="caller", show_default=True)
@click.option("--function", "functions", multiple=True, help="Only this function (may be repeated).")
@click.option("--max-concurrent", type=click.IntRange(1), help="Requests at once, a gateway (default: any).")
@click.option("--expires", type=DURATION, help="Good for so long, e.g. 720h.")
@click.option("-o", "--output", "form", type=click.Choice(["text", "json"]), default="text")
@client_options
def create(
    tenant: str,
    name: str,
    role: str,
    functions: tuple[str, ...],
    max_concurrent: int | None,
    expires: float | None,
    form: str,
    url: str | None,
    api_key: str | None,
) -> None:
    """Make a key and print it: the only time that it is shown.

    Example: hypercast keys create --tenant acme --name ci
    """
    body = {
        "tenant": tenant,
        "name": name,
        "role": role,
        "functions": list(functions),
        "expires_in_s": expires,
        "max_concurrent": max_concurrent,
    }
    with connect(url, api_key) as client:
        made = client.json("POST", "/admin/keys", json=body)
    if form == "json":
        click.echo(json.dumps(made, indent=2))
        return
    note(f"key {made['id']} for tenant {made['tenant']}; it is not shown again:")
    click.echo(made["key"])


@keys_command.command("list")
@output_option
@client_options
def list_keys(form: str, url: str | None, api_key: str | None) -> None:
    """List keys (never their secrets).

    Example: hypercast keys list
    """
    with connect(url, api_key) as client:
        emit_rows(client.json("GET", "/admin/keys")["keys"], COLUMNS, form)


@keys_command.command("revoke")
@click.argument("key_id")
@output_option
@client_options
def revoke(key_id: str, form: str, url: str | None, api_key: str | None) -> None:
    """Revoke a key; it stops working within seconds.

    Example: hypercast keys revoke 3f9a…
    """
    with connect(url, api_key) as client:
        revoked = client.json("DELETE", f"/admin/keys/{segment(key_id)}")
    if form != "table":
        emit_record(revoked, form)
    note(f"revoked {key_id}")
