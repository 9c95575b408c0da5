"""The archive over HTTP and by the command line: what reports print is the same before and after."""

import asyncio
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from click.testing import CliRunner, Result

from cli.errors import CliError
from cli.group import cli
from gateway.control.daily_archive import ArchiveLag, DailyArchive
from gateway.core.audit_writer import AuditWriter
from registry.archive.archive import LedgerArchive
from registry.archive.archiver import LedgerArchiver
from registry.clock import SystemClock
from registry.images.local_store import LocalStore
from registry.records.api_key import KeyRole
from registry.records.usage import RequestRecord
from registry.redis.state import RedisState
from tests.fixtures.archive import history
from tests.fixtures.gateway_http import Gateway, gateway
from tests.fixtures.patience import PATIENCE_S, until

REPORTS = (
    ("usage", "report", "-o", "csv"),
    ("usage", "report", "--by", "tenant,day,status", "-o", "csv"),
    ("usage", "report", "--by", "key", "--since", "2023-11-15T10:30Z", "-o", "json"),
    ("usage", "summary", "-o", "json"),
    ("usage", "bill", "--since", "2023-11-01", "--until", "2023-12-01", "-o", "csv"),
    ("usage", "export", "--format", "focus"),
    ("usage", "export", "--format", "lago", "--until", "2023-11-16T08:00Z"),
    ("gpu-time", "--by", "tenant,node", "--resolution", "1d", "-o", "csv"),
    ("usage", "check", "-o", "json"),
    ("usage", "show", "q3", "-o", "json"),
    ("usage", "show", "c3", "-o", "json"),
)


async def fill(state: RedisState) -> int:
    rows = history(11, 120)
    for row in rows:
        if isinstance(row, RequestRecord):
            await state.add_request(row)
        elif hasattr(row, "state"):
            await state.add_interval(row)
        else:
            await state.add_lost_call(row)
    return len(rows)


async def test_commands_print_the_same_before_and_after(empty_redis_url: str, tmp_path: Path) -> None:
    async with RedisState.connect(empty_redis_url) as state:
        archive = LedgerArchive.open(state, LocalStore(tmp_path), SystemClock())
        count = await fill(state)
        async with gateway(state=state, archive=archive) as gw, gw.http(gw.caller_key) as caller:

            async def hypercast(*arguments: str) -> Result:
                env = {"HYPERCAST_URL": gw.url, "HYPERCAST_API_KEY": gw.admin_key}
                return await asyncio.to_thread(CliRunner().invoke, cli, arguments, env=env)

            before = [(await hypercast(*command)).stdout for command in REPORTS]
            assert json.loads(before[-2])["request_id"] == "q3"
            own = (await caller.get("/admin/usage/summary")).json()
            early = await hypercast("usage", "archive", "--before", "2023-11-16", "-o", "json")
            assert {row["day"] for row in json.loads(early.stdout)} == {"2023-11-14", "2023-11-15"}
            assert [(await hypercast(*command)).stdout for command in REPORTS] == before
            assert "rows archived" in (await hypercast("usage", "archive")).stderr
            assert [(await hypercast(*command)).stdout for command in REPORTS] == before
            assert (await caller.get("/admin/usage/summary")).json() == own
            listed = json.loads((await hypercast("usage", "archive", "--list", "-o", "json")).stdout)
            assert sum(row["rows"] for row in listed) == count
            assert (await hypercast("usage", "archive", "-o", "csv")).stdout == "day,kind,rows,bytes,digest\n"
            refused = await hypercast("usage", "archive", "--before", "2199-01-01")
            assert isinstance(refused.exception, CliError) and refused.exception.exit_code == 2
            for path in ("archive", "delete"):
                assert (await caller.post(f"/admin/usage/{path}", json={})).status_code == 403
            assert (await caller.get("/admin/usage/show/q-nobody")).status_code == 404
            await delete_a_tenant(gw, hypercast)
        await archive.aclose()


async def delete_a_tenant(gw: Gateway, hypercast) -> None:  # type: ignore[no-untyped-def]
    sums = json.loads((await hypercast("usage", "report", "--by", "function", "-o", "json")).stdout)
    asked = await hypercast("usage", "delete", "--tenant", "acme")
    assert asked.exit_code == 1 and "--yes" in str(asked.exception)
    busy = await hypercast("usage", "delete", "--tenant", "acme", "--yes")
    assert "revoke" in str(busy.exception)
    for key in await gw.state.keys():
        if key.role is KeyRole.CALLER:
            await hypercast("keys", "revoke", key.id)
    done = json.loads((await hypercast("usage", "delete", "--tenant", "acme", "--yes", "-o", "json")).stdout)
    tenants = json.loads((await hypercast("usage", "report", "-o", "json")).stdout)
    assert done["requests"] > 10
    assert {row["tenant"] for row in tenants} == {"other", "ümlaut", done["alias"]}
    assert json.loads((await hypercast("usage", "report", "--by", "function", "-o", "json")).stdout) == sums


async def test_the_controller_archives_closed_days(empty_redis_url: str, tmp_path: Path) -> None:
    class Leader:
        """A gateway that leads."""

        epoch: int | None = 1

    class Watched(LedgerArchiver):
        """An archiver that reports when nothing is due."""

        done = asyncio.Event()
        found: ClassVar[list[float]] = []

        async def due_since(self) -> float | None:
            found = await super().due_since()
            if found is None:
                self.done.set()
            else:
                self.found.append(found)
            return found

    async with RedisState.connect(empty_redis_url) as state:
        archive = LedgerArchive.open(state, LocalStore(tmp_path), SystemClock())
        await fill(state)
        archiver = Watched(state, archive.files, SystemClock())
        audit = AuditWriter(state, SystemClock(), "g")
        lag = ArchiveLag(SystemClock())
        daily = DailyArchive(archiver, Leader(), audit, lag, check_s=0.01)  # type: ignore[arg-type]
        assert lag.seconds() is None
        job = asyncio.create_task(daily.run())
        async with asyncio.timeout(PATIENCE_S):
            await archiver.done.wait()
        assert datetime.fromtimestamp(archiver.found[0], UTC).isoformat() == "2023-11-15T01:00:00+00:00"
        await until(lambda: lag.seconds() == 0)
        job.cancel()
        await asyncio.wait([job])
        assert len((await archive.ledger.index()).files) > 6
        (recorded,) = (await state.audit_page()).records
        assert (recorded.entry.operation, recorded.entry.gateway) == ("usage.archive", "g")
        assert recorded.outcome is not None and recorded.outcome.status == 200
        await archive.aclose()


def test_a_gateway_starts_without_pyarrow_in_memory() -> None:
    script = "import sys, gateway.__main__, cli.commands.usage; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
