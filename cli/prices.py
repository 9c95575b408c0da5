"""`prices`: the price table. A price never changes: a new one is a new id, and the greatest is in force."""

import re
from typing import Any

import click

from cli.errors import CliError
from cli.options import client_options, connect, output_option, query
from cli.output import emit_record, emit_rows

COLUMNS = (
    "id",
    "gpu_type",
    "gpu_second_nanos",
    "request_nanos",
    "prompt_mtoken_nanos",
    "completion_mtoken_nanos",
    "currency",
)


@click.group("prices")
def prices_command() -> None:
    """Prices, in billionths of the currency unit."""


@prices_command.command("list")
@output_option
@client_options
def list_prices(form: str, url: str | None, api_key: str | None) -> None:
    """All prices there ever were; of a type the one with the greatest id is in force.

    Example: hypercast prices list
    """
    with connect(url, api_key) as client:
        emit_rows(client.json("GET", "/admin/prices")["rates"], COLUMNS, form)


@prices_command.command("set")
@click.option("--gpu-type", required=True, help="As nodes tell it, or a word of it: h100, cpu, gpu (any).")
@click.option("--gpu-second-nanos", type=click.IntRange(0), required=True, help="For a second of a GPU.")
@click.option("--request-nanos", type=click.IntRange(0), default=0, show_default=True, help="For a request.")
@click.option("--prompt-mtoken-nanos", type=click.IntRange(0), help="For a million tokens of prompts.")
@click.option("--completion-mtoken-nanos", type=click.IntRange(0), help="For a million generated tokens.")
@click.option("--currency", help="USD unless told otherwise.")
@output_option
@client_options
def set_price(form: str, url: str | None, api_key: str | None, gpu_type: str, **price: Any) -> None:
    """Add a price under the next id of its type; it is in force for requests from now on.

    Example: hypercast prices set --gpu-type h100 --gpu-second-nanos 1200000
    """
    with connect(url, api_key) as client:
        rates = client.json("GET", "/admin/prices")["rates"]
        new = next_id(gpu_type, [rate["id"] for rate in rates])
        greater = [rate["id"] for rate in rates if rate["gpu_type"] == gpu_type and rate["id"] > new]
        if greater:
            raise CliError(f"price {greater[0]} would stay in force: its id is greater than {new}")
        body = query(id=new, gpu_type=gpu_type, **price)
        emit_record(client.json("POST", "/admin/prices", json=body), form)


def next_id(gpu_type: str, ids: list[str]) -> str:
    """`h100-002` after `h100-001`."""
    base = re.sub(r"[^a-z0-9]+", "-", gpu_type.lower()).strip("-") or "gpu"
    numbers = [int(match[1]) for name in ids if (match := re.fullmatch(rf"{re.escape(base)}-(\d+)", name))]
    return f"{base}-{max(numbers, default=0) + 1:03}"
