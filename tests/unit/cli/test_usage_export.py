"""`usage export` and `usage bill` against a gateway over the fakes beside its seams."""

import asyncio
import csv
import io
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.commands.usage_bill import month_start
from cli.errors import CliError, UsageError
from cli.exports import write_csv, write_parquet
from cli.group import cli
from registry.errors import StateUnavailable
from registry.exports.exporter import ExportFormat
from registry.exports.focus import COLUMNS
from registry.memory.state import MemoryState
from registry.records.usage import RequestRecord
from registry.state import ClusterConfig, UsageFilter
from tests.fixtures.exports import exported
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway
from tests.fixtures.registry_records import request

Command = Callable[..., Result]
NOW = 1_700_000_000.0
DAY_S = 86_400.0


def against(scenario: Callable[[Command], None], state: MemoryState | None = None) -> None:
    """Run a scenario of commands in a thread beside a gateway with two tenants' requests of two days."""

    async def main() -> None:
        async with gateway(state=state) as gw:
            await fill(gw)

            def hypercast(*arguments: str) -> Result:
                env = {"HYPERCAST_URL": gw.url, "HYPERCAST_API_KEY": gw.admin_key}
                return CliRunner().invoke(cli, arguments, env=env)

            await asyncio.to_thread(scenario, hypercast)

    asyncio.run(main())


async def fill(gw: Gateway) -> None:
    await gw.state.cluster_config(ClusterConfig(cluster_id="c0ffee", store_url="x"))
    await gw.add_function("coder", tokenizer=byte_tokenizer())
    for number in range(300):
        tenant = "other" if number % 3 else "acme"
        at = NOW + number + (DAY_S if number > 200 else 0)
        await gw.state.add_request(request(f"r{number}", tenant=tenant, key_id=f"k{number % 2}", ended_at=at))


COST = "$0.01356"  # of 300 requests at 45 200 nanos


def test_focus_is_written_as_csv_and_as_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")

    def scenario(hypercast: Command) -> None:
        shown = hypercast("usage", "export", "--format", "focus")
        rows = list(csv.DictReader(io.StringIO(shown.stdout)))
        assert shown.stderr == f"{len(rows)} rows, {COST}\n"
        file = tmp_path / "focus.parquet"
        done = hypercast("usage", "export", "--format", "focus", "-o", "parquet", "--file", str(file))
        assert done.exit_code == 0 and done.stderr == shown.stderr and not done.stdout
        table = parquet.read_table(file)
        assert table.column_names == list(COLUMNS) == list(rows[0])
        assert table["BilledCost"].to_pylist() == [Decimal(row["BilledCost"]) for row in rows]
        assert str(table.schema.field("ChargePeriodStart").type) == "timestamp[us, tz=UTC]"
        assert table["InvoiceId"].null_count == len(rows)
        piped = hypercast("usage", "export", "--format", "focus", "-o", "parquet").stdout_bytes
        assert parquet.read_table(io.BytesIO(piped)).equals(table)
        one = hypercast("usage", "export", "--format", "focus", "--tenant", "acme", "--until", "2023-11-15")
        assert {row["BillingAccountId"] for row in csv.DictReader(io.StringIO(one.stdout))} == {"acme"}

    against(scenario)


def test_events_are_written_a_line_each(tmp_path: Path) -> None:
    def scenario(hypercast: Command) -> None:
        file = tmp_path / "events.jsonl"
        done = hypercast("usage", "export", "--format", "openmeter", "--file", str(file))
        assert done.stderr == "300 events\n"
        events = [json.loads(line) for line in file.read_text().splitlines()]
        assert [event["id"] for event in events] == [f"r{number}" for number in range(300)]
        lago = hypercast("usage", "export", "--format", "lago").stdout.splitlines()
        assert len(lago) == 300 * 4
        for wrong in (("lago", "-o", "csv"), ("focus", "-o", "jsonl"), ("lago", "--provider", "x")):
            refused = hypercast("usage", "export", "--format", *wrong)
            assert isinstance(refused.exception, UsageError)

    against(scenario)


class ShortLedger(MemoryState):
    """The second page of its requests cannot be read."""

    async def requests(
        self, where: UsageFilter, *, limit: int = 1000, cursor: str = ""
    ) -> tuple[list[RequestRecord], str]:
        if cursor:
            raise StateUnavailable("gone")
        return await super().requests(where, limit=limit, cursor=cursor)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_file_is_there_only_when_all_of_it_is(form: str, tmp_path: Path) -> None:
    def scenario(hypercast: Command) -> None:
        file = tmp_path / "focus"
        file.write_text("the export of yesterday")
        failed = hypercast("usage", "export", "--format", "focus", "-o", form, "--file", str(file))
        assert isinstance(failed.exception, CliError)
        assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [
            ("focus", "the export of yesterday")
        ]

    against(scenario, ShortLedger())


def test_the_bill_has_days_keys_and_totals() -> None:
    def scenario(hypercast: Command) -> None:
        period = ("--since", "2023-11-01", "--until", "2023-12-01")
        lines = hypercast("usage", "bill", *period).stdout.splitlines()
        assert lines[0] == f"2023-11-01T00:00:00Z to 2023-12-01T00:00:00Z: 300 requests, {COST}"
        assert [line.split()[0] for line in lines[3:6]] == ["2023-11-14", "2023-11-15", "total"]
        assert [line.split()[:2] for line in lines[8:12]] == [
            [tenant, key] for tenant in ("acme", "other") for key in ("k0", "k1")
        ]
        assert lines[5].split()[-1] == lines[12].split()[-1] == COST
        whole: dict[str, Any] = json.loads(hypercast("usage", "bill", *period, "-o", "json").stdout)
        assert (whole["currency"], whole["since"]) == ("USD", "2023-11-01T00:00:00.000Z")
        for rows in (whole["days"], whole["keys"]):
            for name in whole["total"]:
                assert sum(row[name] for row in rows) == whole["total"][name]
        lines = hypercast("usage", "bill", *period, "-o", "csv").stdout.splitlines()
        assert lines[0].startswith("day,tenant,key,requests,") and len(lines) == 1 + 2 * 4
        own = hypercast("usage", "bill", *period, "--tenant", "acme").stdout
        assert "100 requests of tenant acme" in own and "other" not in own

    against(scenario)


def test_usage_alone_is_the_bill_of_this_month() -> None:
    def scenario(hypercast: Command) -> None:
        shown = hypercast("usage")
        assert shown.exit_code == 0 and ": 0 requests, $0.00\n" in shown.stdout
        assert hypercast("usage", "report").stdout.splitlines()[-1].split()[0] == "total"

    against(scenario)
    assert month_start(NOW) == 1_698_796_800.0  # 2023-11-01


def test_a_quote_is_printed_instead_of_an_answer() -> None:
    def scenario(hypercast: Command) -> None:
        shown = hypercast("invoke", "coder", "-p", "hello", "-n", "8", "--quote").stdout
        assert ": 1 request, 4 prompt tokens, up to 8 generated tokens, about " in shown
        quote = json.loads(hypercast("invoke", "coder", "-p", "hello", "--quote", "-o", "json").stdout)
        assert quote["object"] == "quote" and quote["cost_nanos"] > 0

    against(scenario)


def test_files_are_written_in_batches() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    ledger = [request(f"r{number}", key_id=f"k{number}", ended_at=NOW) for number in range(2000)]
    lines = exported(ExportFormat.FOCUS, ledger, page=200).splitlines()
    table, text = io.BytesIO(), io.BytesIO()
    totals = write_parquet(iter(lines), table)
    assert write_csv(iter(lines), text) == totals
    assert (totals.rows, totals.cost_nanos) == (8000, 2000 * 45_200)
    assert text.getvalue().decode().splitlines() == lines
    file = parquet.ParquetFile(table)
    assert (file.num_row_groups, file.metadata.num_rows) == (2, 8000)
