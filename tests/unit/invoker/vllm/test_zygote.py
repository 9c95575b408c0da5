"""Servers that are forked from a process with vLLM imported."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from invoker.vllm.arguments import VllmSpec
from invoker.vllm.errors import ServerFailed
from invoker.vllm.forking import ServerOrder, VllmZygote, make_zygote
from invoker.vllm.server import VllmServer
from tests.fixtures.fake_vllm import interpreter
from tests.fixtures.patience import until

pytestmark = pytest.mark.anyio


def spec_in(folder: Path, name: str) -> VllmSpec:
    """Return a server of a folder."""
    made = folder / name
    (made / "scratch").mkdir(parents=True)
    (made / "model.safetensors").touch()
    (made / "config.json").write_text('{"architectures": ["A"]}')
    return VllmSpec(
        python=folder / "python",
        folder=made,
        scratch=made / "scratch",
        name=name,
        dtype="",
        context_length=0,
        max_sequences=2,
        device="cpu",
        memory_bytes=1 << 30,
    )


@asynccontextmanager
async def ready_zygote(folder: Path) -> AsyncIterator[VllmZygote]:
    made = make_zygote(interpreter(folder), "cpu", folder / "zygote", restart_s=0.0)
    async with made.running() as zygote:
        await zygote.ready.wait()
        yield zygote


@asynccontextmanager
async def running(spec: VllmSpec, zygote: VllmZygote) -> AsyncIterator[tuple[VllmServer, list[str]]]:
    """Run a server; yields it with the lines of its log."""
    lines: list[str] = []
    server = await VllmServer.spawn(
        spec, lines.append, on_ready=lambda: None, on_ended=lambda: None, zygote=zygote
    )
    try:
        yield server, lines
    finally:
        await server.aclose()


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the processes below this one that run in the folder or one within it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if Path(process.cwd()).is_relative_to(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


async def test_a_forked_server_answers_and_ends(tmp_path: Path) -> None:
    one, other = spec_in(tmp_path, "one"), spec_in(tmp_path, "other")
    async with ready_zygote(tmp_path) as zygote:
        async with running(one, zygote) as (first, _), running(other, zygote) as (second, _):
            await first.wait_ready()
            await second.wait_ready()
            (parent,) = processes_in(tmp_path / "zygote")
            guard, _ = processes_in(one.scratch)
            assert guard.parent() == parent and guard.parent() != psutil.Process()
            await first.aclose()
            assert not processes_in(one.scratch) and not second.ended.is_set()
        assert not processes_in(other.scratch)
    assert not processes_in(tmp_path)


async def test_how_a_forked_server_ended_is_known(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, "f")
    async with ready_zygote(tmp_path) as zygote, running(spec, zygote) as (server, _):
        await server.wait_ready()
        _, child = processes_in(spec.scratch)
        child.kill()
        await server.ended.wait()
        assert "was killed by SIGKILL" in server.reason


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    spec = replace(spec_in(tmp_path, "f"), arguments=("--no-such-argument",))
    async with ready_zygote(tmp_path) as zygote, running(spec, zygote) as (server, _):
        with pytest.raises(ServerFailed, match=r"ended with status 2; .*no-such-argument"):
            await server.wait_ready()


async def test_servers_end_with_their_zygote_and_the_next_forks_again(tmp_path: Path) -> None:
    async with ready_zygote(tmp_path) as zygote:
        spec = spec_in(tmp_path, "f")
        async with running(spec, zygote) as (server, _):
            await server.wait_ready()
            (parent,) = processes_in(tmp_path / "zygote")
            os.kill(parent.pid, signal.SIGKILL)
            await server.ended.wait()
            await until(lambda: not processes_in(spec.scratch))
        await zygote.ready.wait()
        async with running(spec_in(tmp_path, "g"), zygote) as (server, _):
            await server.wait_ready()


async def test_arguments_are_checked_in_a_fork(tmp_path: Path) -> None:
    async with ready_zygote(tmp_path) as zygote:
        assert await zygote.check({"arguments": ["--seed", "1"], "architectures": []}) == ""
        refused = await zygote.check({"arguments": ["--no-such-argument"], "architectures": []})
        assert "unrecognized arguments: --no-such-argument" in refused
        with pytest.raises(ServerFailed, match="the check ended with status 1"):
            await zygote.check({"arguments": []})
        assert await zygote.check({"arguments": [], "architectures": []}) == ""


async def test_without_a_zygote_that_is_ready_nothing_is_forked(tmp_path: Path) -> None:
    zygote = make_zygote(Path("/bin/false"), "cpu", tmp_path / "zygote")
    order = ServerOrder(
        id="a", arguments=(), environment={}, folder=tmp_path, memory_bytes=1, tasks=1, end_s=0.0
    )
    with pytest.raises(ServerFailed, match="not ready"):
        await zygote.fork(order, 1)
