"""`share`: which tenants may call a function."""

from collections.abc import Sequence
from typing import Any

import click

from cli.client import Client, segment
from cli.completion import function_names
from cli.errors import UsageError
from cli.options import client_options, output_option
from cli.output import emit_record
from cli.progress import note

EVERYBODY = "all"
VISIBILITY = click.Choice(["public", "private"])


def access_body(
    owner: str | None, visibility: str | None, share: Sequence[str], unshare: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the access to change, as a field of the API; empty if there is none. Raises UsageError."""
    added, removed = tenants(share), tenants(unshare)
    if EVERYBODY in added:
        if visibility == "private" or len(added) > 1 or removed:
            raise UsageError("a function that is shared with all is public: name no tenants beside it")
        visibility, added = "public", []
    given = {"owner": owner, "visibility": visibility, "share": added, "unshare": removed}
    return {field: value for field, value in given.items() if value}


def tenants(given: Sequence[str]) -> list[str]:
    """Return the tenants of a repeated option, each of which may be a list with commas."""
    return [name.strip() for text in given for name in text.split(",") if name.strip()]


def shared(function: dict[str, Any]) -> str:
    """Return the owner of a function, and which tenants may call it."""
    owner = function["owner"] or "the operator"
    if function["visibility"] == "public":
        return f"{owner}; public"
    others = ", ".join(function["shared_with"])
    return f"{owner}; private" + (f", shared with {others}" if others else "")


@click.command("share")
@click.argument("name", shell_complete=function_names)
@click.option(
    "--with", "share", multiple=True, metavar="TENANT|all", help="Let this tenant call it (repeatable)."
)
@click.option(
    "--remove", "unshare", multiple=True, metavar="TENANT", help="No longer let it call (repeatable)."
)
@click.option("--visibility", type=VISIBILITY, help="Let all tenants call it, or only named ones.")
@click.option("--owner", metavar="TENANT", help="Make it this tenant's (admin keys only).")
@output_option
@client_options
def share_command(
    name: str,
    share: tuple[str, ...],
    unshare: tuple[str, ...],
    visibility: str | None,
    owner: str | None,
    form: str,
    client: Client,
) -> None:
    """Change which tenants may call a function, and whose it is.

    A private function is called by its owner and the tenants that it is shared with, a public one by all.

    \b
    Examples:
      hypercast share tiny-coder --with globex
      hypercast share tiny-coder --remove globex
      hypercast share tiny-coder --with all
      hypercast share tiny-coder --visibility private --owner acme
    """
    access = access_body(owner, visibility, share, unshare)
    if not access:
        raise UsageError("name a change: --with, --remove, --visibility or --owner")
    function = client.json("PATCH", f"/admin/functions/{segment(name)}", json={"access": access})
    if form in ("json", "csv"):
        emit_record(
            {field: function[field] for field in ("name", "owner", "visibility", "shared_with")}, form
        )
    note(f"{name}: {shared(function)}")
