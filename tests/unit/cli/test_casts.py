"""`casts` against a gateway over the fakes beside its seams."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner, Result

from cli.cluster_view import bar
from cli.commands.casts import MAX_REASONS, rate, seconds, why
from cli.errors import CliError
from cli.group import cli
from rdmacast.cast.record import CastMember
from registry.clock import SystemClock
from registry.records.cast import CastProgress, CastRecord, CastState
from registry.records.change import NodeUp
from tests.fixtures.gateway_http import Gateway, gateway
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.registry_records import cast, cast_progress, node

ROOT = Path(__file__).resolve().parents[3]
LATE = CastMember(node="n9", host="h9", address="tcp://127.0.0.1:9")


def now() -> float:
    return SystemClock().wall_s()


class Scene:
    """What a scenario in a thread may do: call commands, and change what the gateway's state holds."""

    def __init__(self, gw: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        self._gw = gw
        self._loop = loop
        self.env = {"HYPERCAST_URL": gw.url, "HYPERCAST_API_KEY": gw.admin_key}

    def hypercast(self, *arguments: str) -> Result:
        return CliRunner().invoke(cli, arguments, env=self.env)

    def failure(self, *arguments: str) -> CliError:
        error = self.hypercast(*arguments).exception
        assert isinstance(error, CliError)
        return error

    def put(self, *changes: CastRecord | CastProgress) -> None:
        asyncio.run_coroutine_threadsafe(self._put(changes), self._loop).result()

    async def _put(self, changes: Sequence[CastRecord | CastProgress]) -> None:
        state, cluster = self._gw.state, self._gw.cluster
        for change in changes:
            if isinstance(change, CastRecord):
                await state.put_cast(change)
                continue
            await state.put_cast_progress(change)
            if change.state is not CastState.RUNNING:
                cluster.ended.setdefault(change.cast_id, {})[change.node] = change.state
        cluster.snapshot = replace(cluster.snapshot, casts=(await state.snapshot()).casts)
        cluster.changes.notify()


def against(scenario: Callable[[Scene], None]) -> None:
    """Run a scenario beside a gateway that knows nodes n0, n1, n2 and n9."""

    async def main() -> None:
        async with gateway() as gw:
            ups = (NodeUp(record=node(f"n{i}", started_at=1.0), ttl_s=6.0) for i in (0, 1, 2, 9))
            gw.cluster.snapshot = replace(gw.cluster.snapshot, nodes=tuple(ups))
            await asyncio.to_thread(scenario, Scene(gw, asyncio.get_running_loop()))

    asyncio.run(main())


def running(name: str, **changes: object) -> CastProgress:
    return cast_progress(name, **{"updated_at": now(), **changes})


def whole(name: str) -> CastProgress:
    return running(name, state=CastState.COMPLETE, held=4, received={"tcp": 1 << 20}, seconds=0.01)


def test_casts_are_listed() -> None:
    def scenario(scene: Scene) -> None:
        assert len(scene.hypercast("casts").stdout.splitlines()) == 1
        scene.put(cast("abc", started_at=now()), whole("n1"), replace(whole("n1"), cast_id="abc"))
        scene.put(cast("abd", function="other", started_at=now() + 1))
        lines = scene.hypercast("casts").stdout.splitlines()
        assert [line.split()[:4] for line in lines[1:]] == [
            ["abd", "other:1", "running", "0/2"],
            ["abc", "tiny:1", "running", "1/2"],
        ]
        assert "1.0 MiB tcp" in lines[2] and "0.10 GB/s" in lines[2]
        assert len(scene.hypercast("casts", "--function", "tiny").stdout.splitlines()) == 2
        found = json.loads(scene.hypercast("casts", "-o", "json").stdout)
        assert [one["cast_id"] for one in found] == ["abd", "abc"] and len(found[1]["nodes"]) == 3
        table = scene.hypercast("casts", "-o", "csv").stdout.splitlines()
        assert table[0].startswith("cast_id,function,version,state,done,targets,") and len(table) == 3

    against(scenario)


def test_one_cast_shows_its_plan_and_each_node() -> None:
    def scenario(scene: Scene) -> None:
        record = cast("abc", started_at=now(), members=(*cast().members, LATE), epoch=1)
        tcp = "tcp: host 'h0' is not 'h1'"
        scene.put(
            record,
            running("n1", cast_id="abc", transports={"n2": tcp, "n0": tcp}, faults={"late": 2}),
            running("n2", cast_id="abc", state=CastState.FAILED, error="nobody has block 3"),
        )
        text = scene.hypercast("casts", "ab").stdout
        assert "binomial, 4 blocks of 256.0 KiB, from n0 to 3 nodes, 1 of them joined later" in text
        assert "binomial, 4 blocks: 2 hops" in text  # why
        table, reasons = text.split("\n\n")[1:]
        source, first, second, late = table.splitlines()[-4:]
        assert "reads the store" in source and "50%" in first and "2 late" in first
        assert "tcp (n0 n2)" in first
        assert reasons.splitlines() == [
            f"n1 from n0 over {tcp}",
            f"n1 from n2 over {tcp}",
            "n2 from n0 over tcp: another host",
        ]
        assert "failed" in second and "nobody has block 3" in second
        assert "waiting (late)" in late
        assert json.loads(scene.hypercast("casts", "abc", "-o", "json").stdout)["epoch"] == 1
        nodes = scene.hypercast("casts", "abc", "-o", "csv").stdout.splitlines()
        assert nodes[0].startswith("node,host,tier,") and len(nodes) == 5

    against(scenario)


def test_ids_may_be_cut_short_where_that_is_clear() -> None:
    def scenario(scene: Scene) -> None:
        scene.put(cast("ab", started_at=now()), cast("abc", started_at=now()), cast("abd", started_at=now()))
        assert scene.hypercast("casts", "ab", "-o", "json").exit_code == 0  # it is an id itself
        assert scene.hypercast("casts", "abd", "-o", "json").exit_code == 0
        assert (scene.failure("casts", "a").exit_code, scene.failure("casts", "x").exit_code) == (2, 4)
        assert scene.failure("casts", "--watch", "-o", "json").exit_code == 2

    against(scenario)


def test_watching_one_cast_ends_with_it() -> None:
    def scenario(scene: Scene) -> None:
        scene.put(cast(started_at=now()))
        watching = subprocess.Popen(
            [sys.executable, "-m", "cli", "casts", "c0", "--watch"],
            cwd=ROOT,
            env={**os.environ, **scene.env},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watching.stdout is not None
        with watching:
            for line in watching.stdout:
                if "n2" in line:
                    assert "waiting" in line
                    break
            scene.put(whole("n1"), whole("n2"))
            rest = watching.stdout.read()
            assert watching.wait(PATIENCE_S) == 0
        assert rest.rpartition("Reason")[2].count("█") == 40 and "complete after" in rest

    against(scenario)


def test_ctrl_c_ends_a_live_table_and_shows_the_cursor_again() -> None:
    def scenario(scene: Scene) -> None:
        scene.put(cast("first", started_at=now()))
        ours, theirs = pty.openpty()
        watching = subprocess.Popen(
            [sys.executable, "-m", "cli", "casts", "--watch"],
            cwd=ROOT,
            env={**os.environ, **scene.env, "TERM": "xterm", "COLUMNS": "140"},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(theirs)
        try:
            _read_until(ours, "first")
            scene.put(cast("second", started_at=now()))
            _read_until(ours, "second")
            watching.send_signal(signal.SIGINT)
            _, said = watching.communicate(timeout=PATIENCE_S)
            assert (watching.returncode, said.strip()) == (130, "interrupted")
            assert "\x1b[?25h" in _read_until(ours, "\x1b[?25h")
        finally:
            watching.kill()
            watching.wait()
            os.close(ours)

    against(scenario)


def _read_until(terminal: int, words: str) -> str:
    text = ""
    while words not in text:
        text += os.read(terminal, 65536).decode(errors="replace")
    return text


def test_reasons_are_no_longer_than_a_screen() -> None:
    nodes = [{"node": f"n{i}", "transports": {"m": "tcp: far"}} for i in range(MAX_REASONS + 2)]
    lines = why(nodes).splitlines()
    assert len(lines) == MAX_REASONS + 2 and lines[-1] == "… and 2 more: see -o json"
    assert why([{"node": "n0", "transports": {}}]) == ""


def test_figures_are_short_and_never_say_more_than_there_is() -> None:
    assert (bar(0, 4), bar(999, 1000)[-4:], bar(4, 4)[-4:]) == ("░" * 20 + "   0%", " 99%", "100%")
    assert "░" in bar(999, 1000) and "░" not in bar(4, 4)
    assert (rate(0), rate(2.5e6), rate(1.25e9)) == ("", "2.5 MB/s", "1.25 GB/s")
    assert (seconds(0.25), seconds(119), seconds(1800)) == ("0.2 s", "119.0 s", "30 min")
