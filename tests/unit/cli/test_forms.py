"""Data as JSON and CSV: the same fields and values, from every command that prints data."""

import asyncio
import csv
import io
import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cli.group import COMMANDS, cli
from registry.records.change import NodeUp
from tests.fixtures.gateway_http import gateway
from tests.fixtures.registry_records import cast, cast_progress, instance, node
from tests.fixtures.usage import fill

READS = (
    *(("list",), ("describe", "coder"), ("nodes",), ("keys", "list"), ("prices", "list"), ("casts", "c0")),
    *(("usage", "report"), ("usage", "summary"), ("usage", "show", "a"), ("usage", "check"), ("gpu-time",)),
    *(("doctor",), ("keys", "update", "{key}", "--spend-limit", "5/day"), ("keys", "revoke", "{key}")),
    ("casts",),
)

CHANGING = {"age_s", "seconds", "bytes_s", "found"}  # from one call to the next


def named(value: dict[str, Any], columns: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return the fields of a JSON object as CSV names them."""
    found: dict[str, Any] = {}
    for field, inner in value.items():
        name = f"{prefix}{field}"
        if isinstance(inner, dict) and inner and name not in columns:
            found |= named(inner, columns, f"{name}.")
        else:
            found[name] = inner
    return found


def cell(value: Any) -> str:
    """Return the CSV cell of a JSON value."""
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return ";".join(map(str, value))
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, float):
        return str(value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def test_csv_has_the_fields_and_values_of_json() -> None:
    def run(form: str, *arguments: str) -> str:
        env = {"HYPERCAST_URL": gw.url, "HYPERCAST_API_KEY": gw.admin_key}
        done = CliRunner(env=env).invoke(cli, [*arguments, "-o", form])
        assert done.stdout, (arguments, done.exception)
        return done.stdout

    def compare(*arguments: str) -> None:
        found: Any = json.loads(run("json", *arguments))
        rows = list(csv.DictReader(io.StringIO(run("csv", *arguments))))
        if arguments == ("casts", "c0"):
            found = found["nodes"]
        elif arguments == ("casts",):
            found = [{name: value for name, value in one.items() if name != "nodes"} for one in found]
        records = found if isinstance(found, list) else [found]
        assert len(rows) == len(records) > 0, arguments
        for row, record in zip(rows, records, strict=True):
            fields = named(record, row)
            assert set(row) == set(fields), arguments
            different = {name for name in fields if row[name] != cell(fields[name])}
            assert not different - CHANGING, (arguments, {name: row[name] for name in different})

    async with gateway() as gw:
        await gw.add_function("coder", architectures=["Fake"])
        await fill(gw.state)
        await gw.state.put_cast(cast())
        await gw.state.put_cast_progress(cast_progress(received={"tcp": 5}))
        (key,) = (one.id for one in await gw.state.keys() if one.tenant == "acme")
        gw.cluster.snapshot = replace(
            gw.cluster.snapshot,
            nodes=tuple(
                NodeUp(record=node(name, counters={"evictions": 2}), ttl_s=6.0) for name in ("n0", "n1")
            ),
            instances=(instance("i0", "n0"),),
        )
        for arguments in READS:
            await asyncio.to_thread(compare, *(one.format(key=key) for one in arguments))
        (function,) = json.loads(await asyncio.to_thread(run, "json", "list"))
        assert (function["min"], function["max"]) == (0, None)
        made = json.loads(await asyncio.to_thread(run, "json", "keys", "create"))
        listed = json.loads(await asyncio.to_thread(run, "json", "keys", "list"))
        assert set(made) == {*listed[0], "key"}


def leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command, or the commands of a group."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for inner in command.list_commands(context):
        found = command.get_command(context, inner)
        assert found is not None
        yield from leaves(found, f"{name} {inner}")


# These become another program, or print a script.
@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"gateway", "invoker", "completion"}))
def test_every_command_that_prints_data_has_a_form(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for full_name, leaf in leaves(command, name):
        flags = {flag for option in leaf.params for flag in option.opts}
        assert {"-o", "--output"} <= flags, full_name
