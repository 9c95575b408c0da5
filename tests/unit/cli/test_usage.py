"""`usage`, `gpu-time` and `prices` against a gateway over the fakes beside its seams."""

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.commands.prices import next_id
from cli.errors import CliError
from cli.group import cli
from registry.records.usage import InstanceInterval
from tests.fixtures.gateway_http import Gateway, gateway
from tests.fixtures.usage import fill, interval

Command = Callable[..., Result]


def against(scenario: Callable[[Command, Gateway, asyncio.AbstractEventLoop], None]) -> None:
    """Run a scenario of commands in a thread beside a gateway whose ledger holds a little."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with gateway() as gw:
            await fill(gw.state)

            def hypercast(*arguments: str) -> Result:
                env = {"HYPERCAST_URL": gw.url, "HYPERCAST_API_KEY": gw.admin_key}
                return CliRunner().invoke(cli, arguments, env=env)

            await asyncio.to_thread(scenario, hypercast, gw, loop)

    asyncio.run(main())


def test_reports_and_summaries_are_printed() -> None:
    def scenario(hypercast: Command, gw: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        rows = json.loads(hypercast("usage", "report", "-o", "json").stdout)
        assert list(rows[0]) == [
            "function",
            "tenant",
            "requests",
            "prompt_tokens",
            "completion_tokens",
            "billed_gpu_ms",
            "cost_nanos",
        ]
        lines = hypercast("usage", "report", "--by", "day,status", "-o", "csv").stdout.splitlines()
        assert lines[0].startswith("day,status,requests,") and lines[1].startswith("2023-11-14,ok,2,")
        assert not json.loads(hypercast("usage", "report", "--since", "24h", "-o", "json").stdout)
        until = hypercast("usage", "report", "--until", "2023-11-14T22:13:40Z", "-o", "json")
        assert [row["tenant"] for row in json.loads(until.stdout)] == ["acme"]
        summary = hypercast("usage", "summary").stdout.splitlines()
        assert [line.split()[0] for line in summary[1:]] == ["tiny", "tiny", "total"]
        assert summary[-1].split()[-1] == "$0.0000904"
        assert "$0.0000" in hypercast("usage", "report").stdout
        shown = hypercast("usage", "show", "a").stdout
        assert "CALL ID" in shown and "4000.000" in shown and "Cost:" in shown
        assert json.loads(hypercast("usage", "show", "a", "-o", "json").stdout)["gpu"][0]["node"] == "n0"
        refused = hypercast("usage", "report", "--by", "colour")
        assert isinstance(refused.exception, CliError) and refused.exception.exit_code == 2

    against(scenario)


def test_gpu_time_is_printed_and_written(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")

    def scenario(hypercast: Command, gw: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        (row,) = json.loads(hypercast("gpu-time", "--by", "", "-o", "json").stdout)
        assert row["allocated_ms"] == row["attributed_ms"] + row["loading_ms"] + row["idle_ms"] - 1
        assert row["allocated_ms"] == row["used_ms"] + row["loading_ms"] + row["idle_ms"]
        shown, wide = (
            hypercast("gpu-time", "--by", "", "-o", form).stdout.split() for form in ("table", "wide")
        )
        assert shown == ["TOTAL", "USED", "LOADING", "IDLE", "60.000s", "6.000s", "1.000s", "53.000s"]
        assert (wide[7], wide[-1]) == ("BILLED", "6.001s")
        table = hypercast("gpu-time", "--by", "tenant", "--resolution", "1m").stdout.splitlines()
        assert table[0].split()[:2] == ["FROM", "TENANT"] and len(table) == 1 + 6
        assert table[1].startswith("2023-11-14T22:13:")
        to = tmp_path / "gpu.parquet"
        assert hypercast("gpu-time", "-o", "parquet", "--file", str(to)).exit_code == 0
        assert parquet.read_table(to).column_names == [
            "from",
            "to",
            "function",
            "tenant",
            "node",
            "allocated_ms",
            "used_ms",
            "attributed_ms",
            "loading_ms",
            "idle_ms",
            "lost_ms",
        ]
        piped = hypercast("gpu-time", "--by", "node", "-o", "parquet").stdout_bytes
        assert parquet.read_table(io.BytesIO(piped)).num_rows == 1
        assert hypercast("gpu-time", "--file", str(tmp_path / "t.csv"), "-o", "csv").exit_code == 0
        assert (tmp_path / "t.csv").read_text().startswith("from,to,function,")

    against(scenario)


def test_the_check_waits_and_fails_by_name() -> None:
    def scenario(hypercast: Command, gw: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        def add(one: InstanceInterval) -> None:
            asyncio.run_coroutine_threadsafe(gw.state.add_interval(one), loop).result()

        done = hypercast("usage", "check", "--wait", "60s")
        assert done.exit_code == 0 and done.stdout == "exact: 2 requests on 1 instances of 1 nodes\n"
        add(interval("i9", start=60, end=61, busy_us=5))
        done = hypercast("usage", "check")
        assert isinstance(done.exception, CliError) and done.exception.exit_code == 1
        assert done.stdout.startswith("wrong: ") and "i9" in done.stdout
        later = hypercast("usage", "check", "--since", "2023-11-16", "--until", "2023-11-17")
        assert later.exit_code == 0 and later.stdout == "exact: 0 requests on 0 instances of 0 nodes\n"

    against(scenario)


def test_a_price_gets_the_next_id_of_its_type() -> None:
    def scenario(hypercast: Command, gw: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        done = hypercast("prices", "set", "--gpu-type", "cpu", "--gpu-second-nanos", "60000", "-o", "json")
        assert json.loads(done.stdout) == {
            "id": "cpu-002",
            "gpu_type": "cpu",
            "gpu_second_nanos": 60_000,
            "request_nanos": 200,
            "prompt_mtoken_nanos": 0,
            "completion_mtoken_nanos": 0,
            "currency": "USD",
        }
        assert "cpu-002" in hypercast("prices", "list", "-o", "wide").stdout

    against(scenario)
    assert next_id("NVIDIA H100", ["h100-001"]) == "nvidia-h100-001"
    assert next_id("h100", ["h100-001", "h100-009"]) == "h100-010"


def test_a_price_keeps_what_is_not_named_and_shows_what_changed() -> None:
    def scenario(hypercast: Command, gw: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        done = hypercast("prices", "set", "--gpu-type", "cpu", "--gpu-hour", "2.50")
        assert "$0.18 -> $2.4999984" in done.stdout and "$0.0000002" in done.stdout
        done = hypercast("prices", "set", "--gpu-type", "cpu", "--request", "0.01", "-o", "json")
        made = json.loads(done.stdout)
        assert (made["gpu_second_nanos"], made["request_nanos"]) == (694_444, 10**7)
        listed = json.loads(hypercast("prices", "list", "-o", "json").stdout)
        assert [one["applies"] for one in listed if one["gpu_type"] == "cpu"] == [False, False, True]
        both = ("prices", "set", "--gpu-type", "cpu", "--request", "1", "--request-nanos", "1")
        for refused in (both, ("prices", "set", "--gpu-type", "cpu"), ("prices", "set", "--gpu-type", "new")):
            assert hypercast(*refused).exit_code == 1
        new = hypercast("prices", "set", "--gpu-type", "new", "--request", "1").exception
        assert isinstance(new, CliError) and "--gpu-hour" in str(new)

    against(scenario)
