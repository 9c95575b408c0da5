"""Data as JSON and CSV: the same fields and values, from every command that prints data."""

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cli.group import COMMANDS, cli
from rdmacast.cast.record import CastMember
from registry.records.change import NodeUp
from tests.fixtures.gateway_http import gateway
from tests.fixtures.registry_records import cast, cast_progress, instance, node
from tests.fixtures.usage import done, fill, interval, part, used

Run = Callable[..., Awaitable[str]]

FUNCTION = "f" * 63
NODE = "gpu-node-0123456789.eu-west-1.compute.internal"
TENANT = " is the tenant of a long name"
READS = (
    *(
        ("list",),
        ("describe", "{function}"),
        ("nodes",),
        ("keys", "list"),
        ("prices", "list"),
        ("casts", "c0"),
    ),
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


@asynccontextmanager
async def scene() -> AsyncIterator[Run]:
    """Yield a way to run commands against a gateway whose names and numbers are long."""
    async with gateway() as gw:
        await gw.add_function(FUNCTION)
        await fill(gw.state)
        for name in ("x", "y"):
            record = done(
                name, used(10**12, f"{name}/0"), function=FUNCTION, tenant=f"{name}{TENANT}", node=NODE
            )
            await gw.state.add_request(record)
        days = interval("i9", 0, 10**5, calls=(part("x/0", 0, 5_000_000),))
        await gw.state.add_interval(replace(days, function=FUNCTION, node=NODE))
        members = tuple(
            CastMember(node=f"{NODE}{i}", host=NODE, address="tcp://127.0.0.1:9") for i in range(3)
        )
        await gw.state.put_cast(cast(function=FUNCTION, members=members))
        reason = "tcp: host 'a' is not 'b'; no verbs: pyverbs cannot be imported: No module named 'pyverbs'"
        faults = {"late": 20, "damaged": 100}
        await gw.state.put_cast_progress(
            cast_progress(f"{NODE}1", transports={f"{NODE}{i}": reason for i in (0, 2)}, faults=faults)
        )
        (key,) = (one.id for one in await gw.state.keys() if one.tenant == "acme")
        records = (node(f"{NODE}{i}", host=NODE, counters={"evictions": 2}) for i in range(2))
        starting = replace(instance(f"{FUNCTION}-1-0123abcd", f"{NODE}0"), function=FUNCTION)
        gw.cluster.snapshot = replace(
            gw.cluster.snapshot,
            nodes=tuple(NodeUp(record=record, ttl_s=6.0) for record in records),
            instances=(starting,),
        )

        async def run(*arguments: str, **env: str) -> str:
            env |= {"HYPERCAST_URL": gw.url, "HYPERCAST_API_KEY": gw.admin_key}
            given = [one.format(key=key, function=FUNCTION) for one in arguments]
            ended = await asyncio.to_thread(CliRunner(env=env).invoke, cli, given)
            assert ended.stdout or not ended.exception, (arguments, ended.exception)
            return ended.stdout

        yield run


async def test_csv_has_the_fields_and_values_of_json() -> None:
    async with scene() as run:
        for arguments in READS:
            found: Any = json.loads(await run(*arguments, "-o", "json"))
            rows = list(csv.DictReader(io.StringIO(await run(*arguments, "-o", "csv"))))
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
        (function,) = json.loads(await run("list", "-o", "json"))
        assert (function["min"], function["max"]) == (0, None)
        made = json.loads(await run("keys", "create", "-o", "json"))
        assert set(made) == {*json.loads(await run("keys", "list", "-o", "json"))[0], "key"}
        rotated = json.loads(await run("keys", "rotate", made["id"], "-o", "json"))
        assert set(rotated) == {*made, "former_expires_at"}


async def test_tables_fit_80_columns_and_tell_their_rows_apart() -> None:
    plan = ("plan", "--nodes", "64", "--sources", "4", "--size", "26GB", "--rate", "400gbit")
    by = ("usage", "report", "--by", "function,tenant,key,node,day,status")
    async with scene() as run:
        for arguments in (*READS, by, ("gpu-time", "--resolution", "1d"), plan):
            lines = (await run(*arguments, COLUMNS="80")).splitlines()
            wide = [line for line in lines if len(line) > 80 and " " in line.strip()[81:]]
            assert not wide, (arguments, wide)
            if "usage" in arguments or "gpu-time" in arguments:
                rows = [line for line in lines if line.strip()]
                assert len(set(rows)) == len(rows), arguments
        assert "not yet settled" in await run("usage", "check") and "pyverbs" not in await run("casts", "c0")


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


# These become another program, print a script or a log, or draw a screen.
OTHERS = {"gateway", "invoker", "completion", "secret", "top", "dev"}


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - OTHERS))
def test_every_command_that_prints_data_has_a_form(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    for full_name, leaf in leaves(command, name):
        flags = {flag for option in leaf.params for flag in option.opts}
        assert {"-o", "--output"} <= flags, full_name
