"""`status`, `top` and `--watch` against a gateway over the fakes beside its seams."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from cli.errors import AuthError, CliError
from cli.group import cli
from registry.config.secrets import new_api_key
from registry.records.api_key import KeyRole
from registry.records.instance import InstanceState
from tests.fixtures.gateway_http import Gateway, byte_tokenizer, gateway
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.registry_records import instance, node, request

ROOT = Path(__file__).resolve().parents[3]


class Scene:
    """What a scenario in a thread may do: call commands, and change what the gateway's state holds."""

    def __init__(self, gw: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        self.gw = gw
        self._loop = loop
        self.env = {"HYPERCAST_URL": gw.url, "HYPERCAST_API_KEY": gw.admin_key}

    def hypercast(self, *arguments: str, key: str = "") -> Result:
        env = self.env | ({"HYPERCAST_API_KEY": key} if key else {})
        return CliRunner().invoke(cli, arguments, env=env)

    def do(self, work: Coroutine[Any, Any, Any]) -> None:
        async def run() -> None:
            await work
            await self.gw.cluster.refresh()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def key(self, role: KeyRole) -> str:
        made = new_api_key("acme", role, role.value)
        self.do(self.gw.state.put_key(made.key))
        return made.plaintext

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command that shows its frames one below the other."""
        running = subprocess.Popen(
            [sys.executable, "-m", "cli", *arguments],
            cwd=ROOT,
            env={**os.environ, **self.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with running:
            try:
                yield running
            finally:
                running.kill()


def against(scenario: Callable[[Scene], None]) -> None:
    """Run a scenario beside a gateway of one node, a function and a request today."""

    async def main() -> None:
        async with gateway() as gw:
            await gw.add_function("coder", tokenizer=byte_tokenizer())
            await gw.state.put_node(node(), ttl_s=60)
            await gw.state.add_request(request("r0", ended_at=gw.services.clock.wall_s()))
            await gw.cluster.refresh()
            await asyncio.to_thread(scenario, Scene(gw, asyncio.get_running_loop()))

    asyncio.run(main())


def read_until(running: subprocess.Popen[str], words: str) -> None:
    assert running.stdout is not None
    for line in running.stdout:
        if words in line:
            return
    raise AssertionError(f"it ended without {words!r}")


def test_status_is_one_screen() -> None:
    def scenario(scene: Scene) -> None:
        done = scene.hypercast("status")
        assert done.exit_code == 0, done.output
        labels = {line.partition(":")[0]: line.partition(":")[2].strip() for line in done.stdout.splitlines()}
        assert (labels["Nodes"], labels["Functions"], labels["Casts"]) == (
            "1 ready",
            "1 asleep",
            "none in the last hour",
        )
        assert labels["Cost today"] == "$0.0000452 for 1 request"
        assert "n0" in done.stdout and "coder" in done.stdout
        found = json.loads(scene.hypercast("status", "-o", "json").stdout)
        assert (found["status"], found["nodes"], found["functions"]) == ("ready", {"ready": 1}, {"asleep": 1})
        assert found["cost_today"] == {"requests": 1, "cost_nanos": 45_200, "currency": "USD"}

    against(scenario)


def test_status_leaves_out_what_the_key_may_not_see() -> None:
    def scenario(scene: Scene) -> None:
        viewer = scene.hypercast("status", key=scene.key(KeyRole.VIEWER)).stdout
        assert "Nodes:" in viewer and "Cost today" not in viewer
        billing = scene.hypercast("status", key=scene.key(KeyRole.BILLING)).stdout
        assert "Nodes:" not in billing and "Cost today:" in billing and "billing of tenant acme" in billing
        wrong = scene.hypercast("status", key="hc_0123456789abcdef_" + "x" * 43)
        assert isinstance(wrong.exception, AuthError)

    against(scenario)


def test_status_fails_where_the_gateway_is_not_ready() -> None:
    async def main() -> None:
        async with gateway(expect_nodes=2) as gw:
            done = await asyncio.to_thread(Scene(gw, asyncio.get_running_loop()).hypercast, "status")
            assert isinstance(done.exception, CliError) and done.exception.exit_code == 1
            assert "0 of 2 nodes have joined" in str(done.exception) and "State:" in done.stdout

    asyncio.run(main())


def test_top_once_is_one_screen() -> None:
    def scenario(scene: Scene) -> None:
        text = scene.hypercast("top", "--once").stdout
        assert "nodes: 1 ready; functions: 1 asleep" in text and "0 calls in flight" in text
        refused = scene.hypercast("top", "--once", key=scene.gw.caller_key)
        assert isinstance(refused.exception, AuthError)

    against(scenario)


def test_top_shows_what_changes() -> None:
    def scenario(scene: Scene) -> None:
        with scene.started("top") as top:
            read_until(top, "functions: 1 asleep")
            ready = replace(instance("i0", "n0"), function="coder", state=InstanceState.READY)
            scene.do(scene.gw.state.put_instance(ready, 1))
            read_until(top, "functions: 1 ready")
            scene.do(scene.gw.state.put_node(node("n1"), ttl_s=60))
            read_until(top, "nodes: 2 ready")
            assert top.poll() is None

    against(scenario)


def test_lists_are_shown_again_when_they_change() -> None:
    def scenario(scene: Scene) -> None:
        with scene.started("list", "--watch") as functions, scene.started("nodes", "-w") as nodes:
            read_until(functions, "coder")
            read_until(nodes, "n0")
            scene.do(scene.gw.add_function("second", tokenizer=byte_tokenizer()))
            read_until(functions, "second")
            scene.do(scene.gw.state.put_node(node("n1"), ttl_s=60))
            read_until(nodes, "n1")

    against(scenario)


def test_a_watch_ends_with_its_key_and_not_with_its_gateway() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with gateway() as gw:
            await gw.add_function("coder", tokenizer=byte_tokenizer())
            scene = Scene(gw, loop)
            with scene.started("list", "--watch") as watching:
                await asyncio.to_thread(read_until, watching, "coder")
                gw.server.leave()
                await asyncio.to_thread(read_until, watching, "(retrying: ")
        refused = await asyncio.to_thread(scene.hypercast, "list", "--watch", "-o", "json")
        assert "--watch shows tables" in str(refused.exception)
        async with gateway() as gw:
            scene = Scene(gw, loop)
            scene.env["HYPERCAST_API_KEY"] = gw.caller_key
            with scene.started("list", "--watch") as watching:
                _, error = await asyncio.to_thread(watching.communicate, timeout=PATIENCE_S)
                assert watching.returncode == 3 and "forbidden" not in error and "role" in error

    asyncio.run(main())
