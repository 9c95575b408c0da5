"""`prices`: the price table. A price never changes: a new one has a new id, and the greatest id applies."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any

import click

from cli.client import Client
from cli.errors import CliError, UsageError
from cli.options import client_options, output_option, query
from cli.output import emit_record, emit_rows
from cli.progress import note
from cli.tables import Column, Row
from cli.values import NANOS, money
from registry.accounting.usage_chunks import HOUR_S
from registry.records.usage import PriceRate

FIELDS = (*(field.name for field in fields(PriceRate)), "applies")
PARTS = {
    "gpu_second_nanos": "per GPU second",
    "request_nanos": "per request",
    "prompt_mtoken_nanos": "per million prompt tokens",
    "completion_mtoken_nanos": "per million generated tokens",
}
MAX_NANOS = 10**13


def _money_column(field: str, heading: str, *, factor: int = 1, wide: bool = False, drop: int = 0) -> Column:
    def shown(row: Row) -> str:
        return money(row[field] * factor, row["currency"])

    return Column(field=field, heading=heading, shown=shown, numeric=True, wide=wide, drop=drop)


COLUMNS = (
    Column(field="gpu_type", heading="GPU TYPE", shrink=8),
    Column(field="id", shrink=8, drop=3),
    Column(field="applies", shown=lambda row: "yes" if row["applies"] else "no"),
    _money_column("gpu_second_nanos", "GPU HOUR", factor=HOUR_S),
    _money_column("gpu_second_nanos", "GPU SECOND", wide=True),
    _money_column("request_nanos", "REQUEST"),
    _money_column("prompt_mtoken_nanos", "1M PROMPT TOKENS", drop=2),
    _money_column("completion_mtoken_nanos", "1M OUTPUT TOKENS", drop=1),
)


class _Amount(click.ParamType):
    """An amount of money in the currency's unit, as nanos."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            amount = Decimal(value.removeprefix("$"))
        except InvalidOperation:
            self.fail(f"{value!r} is not an amount, such as 2.50", param, ctx)
        if not amount.is_finite() or amount < 0:
            self.fail(f"{value!r} is not an amount of 0 or more", param, ctx)
        return amount


AMOUNT = _Amount()


@click.group("prices")
def prices_command() -> None:
    """Show and set prices.

    \b
    Examples:
      hypercast prices list
      hypercast prices set --gpu-type h100 --gpu-hour 2.50
    """


@prices_command.command("list")
@output_option
@client_options
def list_prices(form: str, client: Client) -> None:
    """List prices; the newest of each GPU type applies.

    JSON and CSV have prices in billionths of the currency's unit (nanos).

    \b
    Examples:
      hypercast prices list
      hypercast prices list -o json
    """
    rates = client.json("GET", "/admin/prices")["rates"]
    newest = {rate["gpu_type"]: rate["id"] for rate in sorted(rates, key=lambda rate: rate["id"])}
    rows = [{**rate, "applies": newest[rate["gpu_type"]] == rate["id"]} for rate in rates]
    emit_rows(rows, COLUMNS, FIELDS, form)


@prices_command.command("set")
@click.option(
    "--gpu-type", required=True, help="GPU name of nodes or a word of it: h100, cpu; gpu: any other."
)
@click.option("--gpu-hour", type=AMOUNT, metavar="AMOUNT", help="Price of a GPU for an hour, such as 2.50.")
@click.option(
    "--gpu-second-nanos", type=click.IntRange(0, MAX_NANOS), metavar="N", help="Price of a GPU for a second."
)
@click.option("--request", type=AMOUNT, metavar="AMOUNT", help="Price of a request.")
@click.option("--request-nanos", type=click.IntRange(0, MAX_NANOS), metavar="N", help="Price of a request.")
@click.option("--prompt-mtoken", type=AMOUNT, metavar="AMOUNT", help="Price of a million prompt tokens.")
@click.option(
    "--prompt-mtoken-nanos", type=click.IntRange(0, MAX_NANOS), metavar="N", help="The same in nanos."
)
@click.option(
    "--completion-mtoken", type=AMOUNT, metavar="AMOUNT", help="Price of a million generated tokens."
)
@click.option(
    "--completion-mtoken-nanos", type=click.IntRange(0, MAX_NANOS), metavar="N", help="The same in nanos."
)
@click.option("--currency", help="Currency of the first price.  [default: USD]")
@output_option
@client_options
def set_price(form: str, client: Client, gpu_type: str, currency: str | None, **parts: Any) -> None:
    """Set a price for requests from now on; what is not named stays as it was.

    A price is a new entry in the table: requests that are billed already keep theirs. Options that end
    in -nanos are in billionths of the currency's unit, all others in the unit itself.

    \b
    Examples:
      hypercast prices set --gpu-type h100 --gpu-hour 2.50
      hypercast prices set --gpu-type cpu --gpu-second-nanos 60000 --request-nanos 200
    """
    given = parts_in_nanos(parts)
    if not given:
        raise UsageError("name a price to set, such as --gpu-hour 2.50")
    rates = client.json("GET", "/admin/prices")["rates"]
    new = next_id(gpu_type, [rate["id"] for rate in rates])
    of_type = sorted((rate for rate in rates if rate["gpu_type"] == gpu_type), key=lambda one: one["id"])
    if of_type and of_type[-1]["id"] > new:
        raise CliError(f"price {of_type[-1]['id']} would still apply: its id is greater than {new}")
    before = of_type[-1] if of_type else {}
    if "gpu_second_nanos" not in {**before, **given}:
        raise UsageError(f"{gpu_type} has no price yet: name --gpu-hour (or --gpu-second-nanos)")
    kept = {name: before[name] for name in (*PARTS, "currency") if name in before}
    body = kept | given | query(id=new, gpu_type=gpu_type, currency=currency)
    made = client.json("POST", "/admin/prices", json=body)
    emit_record(made, form, changes(before, made))
    note(f"{made['id']} applies to requests from now on")


def parts_in_nanos(parts: Mapping[str, Any]) -> dict[str, int]:
    """Return the prices that were named, in nanos. Raises UsageError for two ways to name one."""
    found: dict[str, int] = {}
    for name, other, seconds in (
        ("gpu_second_nanos", "gpu_hour", HOUR_S),
        ("request_nanos", "request", 1),
        ("prompt_mtoken_nanos", "prompt_mtoken", 1),
        ("completion_mtoken_nanos", "completion_mtoken", 1),
    ):
        nanos, amount = parts[name], parts[other]
        if nanos is not None and amount is not None:
            flags = " and ".join(f"--{flag.replace('_', '-')}" for flag in (other, name))
            raise UsageError(f"{flags} set the same price: name one")
        if amount is not None:
            nanos = int((amount * NANOS / seconds).to_integral_value(ROUND_HALF_UP))
        if nanos is not None:
            found[name] = nanos
    return found


def changes(before: Row, made: Row) -> list[tuple[str, str]]:
    """Return what a new price says, beside the one that it replaces."""
    shown = [("Price", f"{made['id']} of {made['gpu_type']}")]
    for label, field, factor in _shown_parts():
        now = money(made[field] * factor, made["currency"])
        was = money(before[field] * factor, before["currency"]) if before else now
        shown.append((label, now if was == now else f"{was} -> {now}"))
    return shown


def _shown_parts() -> Iterable[tuple[str, str, int]]:
    yield "Per GPU hour", "gpu_second_nanos", HOUR_S
    for field, label in PARTS.items():
        yield label[0].upper() + label[1:], field, 1


def next_id(gpu_type: str, ids: Iterable[str]) -> str:
    """Return the id after the last of a type: `h100-002` after `h100-001`."""
    base = re.sub(r"[^a-z0-9]+", "-", gpu_type.lower()).strip("-") or "gpu"
    numbers = [int(match[1]) for name in ids if (match := re.fullmatch(rf"{re.escape(base)}-(\d+)", name))]
    return f"{base}-{max(numbers, default=0) + 1:03}"
