"""`keys`: API keys and their limits."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from cli.client import Client, segment
from cli.completion import function_names
from cli.errors import CliError, UsageError
from cli.options import DURATION, client_options, output_option
from cli.output import emit_record, emit_rows
from cli.progress import note
from cli.tables import Column, Row
from cli.values import age_of, utc
from registry.config.rotation import replace_secret
from registry.config.secrets import parse_key
from registry.errors import InvalidRecord
from registry.records.api_key import KeyRole, SpendPeriod
from registry.records.quota import SpendLimit, money, parse_spend_limit

F = TypeVar("F", bound=Callable[..., Any])

FIELDS = (
    *("id", "name", "tenant", "role", "state", "functions", "created_at", "expires_at", "revoked_at"),
    *("requests_per_minute", "tokens_per_minute", "max_concurrent"),
    *("spend_limit", "spend_limit_nanos", "spend_period", "spent_nanos"),
)
COLUMNS = (
    Column(field="id", heading="KEY ID"),
    Column(field="name", shrink=6, drop=4),
    Column(field="tenant", shrink=8),
    Column(field="role", drop=3),
    Column(field="state", state=True),
    Column(field="functions", shrink=9, drop=2, shown=lambda row: ", ".join(row["functions"]) or "all"),
    Column(field="created_at", heading="AGE", numeric=True, shown=lambda row: age_of(row["created_at"])),
    Column(field="expires_at", heading="EXPIRES", drop=5),
    Column(field="revoked_at", heading="REVOKED", wide=True),
    Column(field="requests_per_minute", heading="REQUESTS/MIN", numeric=True, wide=True),
    Column(field="tokens_per_minute", heading="TOKENS/MIN", numeric=True, wide=True),
    Column(field="max_concurrent", numeric=True, wide=True),
    Column(field="spend_limit", heading="SPEND LIMIT", numeric=True, drop=1),
    Column(field="spent", numeric=True, drop=1, shown=lambda row: spent(row)),
)
LIFTED = "none"


class Limit(click.ParamType):
    """A limit of a key; where it can be lifted, also the word `none`."""

    name = "limit"

    def __init__(self, *, liftable: bool, money: bool = False) -> None:
        self._liftable = liftable
        self._money = money

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or (self._liftable and value == LIFTED):
            return value
        if not self._money:
            if value.isascii() and value.isdecimal() and int(value) >= 1:
                return int(value)
            self.fail(f"{value!r} is not a number of 1 or more", param, ctx)
        try:
            return parse_spend_limit(value)
        except InvalidRecord as error:
            self.fail(str(error), param, ctx)


def limit_options(*, liftable: bool) -> Callable[[F], F]:
    """Add the options that set a key's limits."""
    unset = ", or 'none' to lift it." if liftable else ".  [default: no limit]"
    number, money = Limit(liftable=liftable), Limit(liftable=liftable, money=True)

    def decorate(command: F) -> F:
        for flag, kind, metavar, what in (
            ("--spend-limit", money, "AMOUNT/PERIOD", "Cost per day, month or total, such as 12.50/month"),
            ("--max-concurrent", number, "N", "Concurrent requests"),
            ("--tokens-per-minute", number, "N", "Prompt and generated tokens per minute"),
            ("--requests-per-minute", number, "N", "Requests per minute"),
        ):
            command = click.option(flag, type=kind, metavar=metavar, help=what + unset)(command)
        return command

    return decorate


def limits_body(limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits that were given, as fields of the API."""
    given = dict(limits)
    spend_limit = given.pop("spend_limit")
    if isinstance(spend_limit, SpendLimit):
        given |= {"spend_limit_nanos": spend_limit.nanos, "spend_period": spend_limit.period.value}
    else:
        given["spend_limit_nanos"] = spend_limit
    return {field: None if value == LIFTED else value for field, value in given.items() if value is not None}


def complete(key: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return a key with its state (active, expired, revoked), and its limit as --spend-limit takes it."""
    expires_at, nanos = key.get("expires_at"), key.get("spend_limit_nanos")
    if key.get("revoked_at") is not None:
        state = "revoked"
    else:
        state = "expired" if expires_at is not None and expires_at <= now else "active"
    limit = None if nanos is None else str(SpendLimit(nanos, SpendPeriod(key["spend_period"])))
    return {**key, "state": state, "spend_limit": limit, "spent_nanos": key.get("spent_nanos")}


def spent(key: Row) -> str:
    """Return what of a spend limit is used."""
    return "" if key["spend_limit"] is None else money(key["spent_nanos"] or 0)


@click.group("keys")
def keys_command() -> None:
    """Create, list, limit, rotate and revoke API keys. Only a hash of a key is stored.

    \b
    Examples:
      hypercast keys create --tenant acme --name ci
      hypercast keys list
    """


@keys_command.command("create")
@click.option("--tenant", default="default", show_default=True, help="Tenant to bill.")
@click.option("--name", default="", help="Free-text name.")
@click.option(
    "--role",
    type=click.Choice([role.value for role in KeyRole]),
    default=KeyRole.CALLER.value,
    show_default=True,
    help="What the key may do; see above.",
)
@click.option(
    "--function",
    "functions",
    multiple=True,
    shell_complete=function_names,
    help="Only this function (repeatable).",
)
@limit_options(liftable=False)
@click.option("--expires", type=DURATION, help="Lifetime, such as 720h.  [default: no end]")
@output_option
@client_options
def create(
    tenant: str,
    name: str,
    role: str,
    functions: tuple[str, ...],
    expires: float | None,
    form: str,
    client: Client,
    **limits: Any,
) -> None:
    """Create a key and print it. It cannot be shown again.

    
    Roles:
      caller    calls functions, sees the usage of its tenant
      deployer  deploys and manages functions of its tenant, and what a caller does
      viewer    sees functions, nodes, instances and casts of all tenants
      billing   sees usage and GPU time of all tenants, prices and the ledger's audit
      admin     everything

    \b
    Examples:
      hypercast keys create --tenant acme --name ci
      hypercast keys create --tenant acme --function chat --spend-limit 50/month --expires 720h
      hypercast keys create --tenant acme --role deployer --name ci
      hypercast keys create --tenant finance --role billing
    """
    body = {
        "tenant": tenant,
        "name": name,
        "role": role,
        "functions": list(functions),
        "expires_in_s": expires,
        **limits_body(limits),
    }
    made = client.json("POST", "/admin/keys", json=body)
    warn_of_unknown(client, functions)
    if form in ("json", "csv"):
        emit_record(complete(made, time.time()), form)
        return
    note(f"key {made['id']} for tenant {made['tenant']}; it cannot be shown again:")
    click.echo(made["key"])


def warn_of_unknown(client: Client, functions: tuple[str, ...]) -> None:
    """Warn of functions that are not deployed: a typo, or deployed later."""
    if not functions:
        return
    try:
        known = {one["name"] for one in client.json("GET", "/admin/functions")["functions"]}
    except CliError:
        return  # the key was created: what is only a warning does not fail
    for name in functions:
        if name not in known:
            note(f"warning: there is no function {name!r} yet")


@keys_command.command("list")
@output_option
@client_options
def list_keys(form: str, client: Client) -> None:
    """List keys (without their secrets) with their limits.

    \b
    Examples:
      hypercast keys list
      hypercast keys list -o wide
    """
    keys = client.json("GET", "/admin/keys")["keys"]
    emit_rows([complete(key, time.time()) for key in keys], COLUMNS, FIELDS, form)


@keys_command.command("update")
@click.argument("key_id")
@limit_options(liftable=True)
@output_option
@client_options
def update(key_id: str, form: str, client: Client, **limits: Any) -> None:
    """Set or lift limits of a key; what is not named stays.

    \b
    Example:
      hypercast keys update 3f9a… --requests-per-minute 600 --spend-limit none
    """
    body = limits_body(limits)
    if not body:
        raise UsageError("name a limit to change, such as --requests-per-minute 600")
    changed = client.json("PATCH", f"/admin/keys/{segment(key_id)}", json=body)
    changed = complete(changed, time.time())
    emit_record(changed, form, shown_key(changed))


def shown_key(key: Row) -> list[tuple[str, str]]:
    """Return the labelled values of a key."""
    none = "no limit"
    return [
        ("Key ID", key["id"]),
        ("Name", key["name"]),
        ("Tenant", key["tenant"]),
        ("Role", key["role"]),
        ("State", key["state"]),
        ("Functions", ", ".join(key["functions"]) or "all"),
        ("Created", f"{utc(key['created_at'])} ({age_of(key['created_at'])} ago)"),
        ("Expires", "never" if key["expires_at"] is None else utc(key["expires_at"])),
        ("Requests per minute", str(key["requests_per_minute"] or none)),
        ("Tokens per minute", str(key["tokens_per_minute"] or none)),
        ("Concurrent requests", str(key["max_concurrent"] or none)),
        (
            "Spend limit",
            none if key["spend_limit"] is None else f"{key['spend_limit']} ({spent(key)} spent)",
        ),
    ]


@keys_command.command("rotate")
@click.argument("key_id")
@click.option(
    "--grace", type=DURATION, default="24h", show_default=True, help="How long the former key still works."
)
@click.option(
    "--key-file",
    type=click.Path(path_type=Path),
    help="File of the former key, such as admin.key, to rewrite.",
)
@output_option
@client_options
def rotate(key_id: str, grace: float, key_file: Path | None, form: str, client: Client) -> None:
    """Create a key like another, which then expires, and print it. It cannot be shown again.

    Tenant, name, role, functions, limits and lifetime are the same; what is spent is counted anew.

    \b
    Examples:
      hypercast keys rotate 3f9a…
      hypercast keys rotate 3f9a… --grace 1h --key-file data/admin.key
    """
    if key_file is not None and parse_key(key_file.read_text()).id != key_id:
        raise UsageError(f"{key_file} holds another key than {key_id}")
    made = client.json("POST", f"/admin/keys/{segment(key_id)}/rotate", json={"grace_s": grace})
    if form in ("json", "csv"):
        emit_record(complete(made, time.time()), form)
    else:
        note(f"key {made['id']} replaces {key_id}; it cannot be shown again:")
        click.echo(made["key"])
    if key_file is not None:
        replace_secret(key_file, (made["key"].encode(),))
    note(f"{key_id} works until {utc(made['former_expires_at'])}; replace it wherever it is in use")


@keys_command.command("revoke")
@click.argument("key_id")
@output_option
@client_options
def revoke(key_id: str, form: str, client: Client) -> None:
    """Revoke a key. It stops working within seconds.

    \b
    Example:
      hypercast keys revoke 3f9a…
    """
    revoked = client.json("DELETE", f"/admin/keys/{segment(key_id)}")
    if form in ("json", "csv"):
        emit_record(complete(revoked, time.time()), form)
    note(f"revoked {key_id}")
