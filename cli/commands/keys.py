"""`keys`: who may call."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from cli.client import segment
from cli.errors import UsageError
from cli.options import DURATION, client_options, connect, output_option
from cli.output import emit_record, emit_rows
from cli.progress import note
from registry.api_key import SpendPeriod
from registry.errors import InvalidRecord
from registry.quota import SpendLimit, money, parse_spend_limit

F = TypeVar("F", bound=Callable[..., Any])

COLUMNS = (
    "id",
    "name",
    "tenant",
    "role",
    "functions",
    "created_at",
    "expires_at",
    "revoked_at",
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent",
    "spend_limit",
    "spent",
)
LIFTED = "none"


class Limit(click.ParamType):
    """A limit of a key; where one may be lifted, also the word `none`."""

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
            self.fail(f"{value!r} is no number of 1 or more", param, ctx)
        try:
            return parse_spend_limit(value)
        except InvalidRecord as error:
            self.fail(str(error), param, ctx)


def limit_options(*, liftable: bool) -> Callable[[F], F]:
    """The options that set a key's limits."""
    unset = ", or 'none' to lift it." if liftable else " (default: no limit)."
    number, money = Limit(liftable=liftable), Limit(liftable=liftable, money=True)

    def decorate(command: F) -> F:
        for flag, kind, metavar, what in (
            ("--spend-limit", money, "AMOUNT/PERIOD", "What a day, month or total may cost, as 12.50/month"),
            ("--max-concurrent", number, "N", "Requests at once"),
            ("--tokens-per-minute", number, "N", "Tokens of prompts and answers a minute"),
            ("--requests-per-minute", number, "N", "Requests a minute"),
        ):
            command = click.option(flag, type=kind, metavar=metavar, help=what + unset)(command)
        return command

    return decorate


def limits_body(
    requests_per_minute: int | str | None,
    tokens_per_minute: int | str | None,
    max_concurrent: int | str | None,
    spend_limit: SpendLimit | str | None,
) -> dict[str, Any]:
    """The limits that were given, as fields of the API."""
    given: dict[str, Any] = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
    }
    if isinstance(spend_limit, SpendLimit):
        given |= {"spend_limit_nanos": spend_limit.nanos, "spend_period": spend_limit.period.value}
    else:
        given["spend_limit_nanos"] = spend_limit
    return {field: None if value == LIFTED else value for field, value in given.items() if value is not None}


def with_money(key: Mapping[str, Any]) -> dict[str, Any]:
    """A key with its spend limit as people write it."""
    nanos = key.get("spend_limit_nanos")
    if nanos is None:
        return {**key, "spend_limit": None, "spent": None}
    limit = SpendLimit(nanos, SpendPeriod(key["spend_period"]))
    return {**key, "spend_limit": str(limit), "spent": f"{money(key.get('spent_nanos') or 0)}"}


@click.group("keys")
def keys_command() -> None:
    """Make, list, limit and revoke API keys. Only a hash of a key is kept."""


@keys_command.command("create")
@click.option("--tenant", default="default", show_default=True, help="Who pays.")
@click.option("--name", default="", help="What it is for.")
@click.option("--role", type=click.Choice(["caller", "admin"]), default="caller", show_default=True)
@click.option("--function", "functions", multiple=True, help="Only this function (may be repeated).")
@limit_options(liftable=False)
@click.option("--expires", type=DURATION, help="Good for so long, e.g. 720h.")
@click.option("-o", "--output", "form", type=click.Choice(["text", "json"]), default="text")
@client_options
def create(
    tenant: str,
    name: str,
    role: str,
    functions: tuple[str, ...],
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    max_concurrent: int | None,
    spend_limit: SpendLimit | None,
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
        **limits_body(requests_per_minute, tokens_per_minute, max_concurrent, spend_limit),
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
    """List keys (never their secrets) with their limits.

    Example: hypercast keys list
    """
    with connect(url, api_key) as client:
        keys = client.json("GET", "/admin/keys")["keys"]
    emit_rows([with_money(key) for key in keys], COLUMNS, form)


@keys_command.command("update")
@click.argument("key_id")
@limit_options(liftable=True)
@output_option
@client_options
def update(
    key_id: str,
    requests_per_minute: int | str | None,
    tokens_per_minute: int | str | None,
    max_concurrent: int | str | None,
    spend_limit: SpendLimit | str | None,
    form: str,
    url: str | None,
    api_key: str | None,
) -> None:
    """Set or lift a key's limits; what is not named stays.

    Example: hypercast keys update 3f9a… --requests-per-minute 600 --spend-limit none
    """
    body = limits_body(requests_per_minute, tokens_per_minute, max_concurrent, spend_limit)
    if not body:
        raise UsageError("name a limit to change, e.g. --requests-per-minute 600")
    with connect(url, api_key) as client:
        changed = client.json("PATCH", f"/admin/keys/{segment(key_id)}", json=body)
    emit_record(with_money(changed), form)


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
