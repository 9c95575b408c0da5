"""Starts of vLLM servers on a node: what they reserve, and what failed ones leave."""

import asyncio
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from invoker.engine.contract import UnsupportedModel
from invoker.host_tier.model_folders import ModelFolders
from invoker.host_tier.tier import HostTier
from invoker.vllm.arguments import VllmSpec
from invoker.vllm.host import VllmHost, has_module
from invoker.vllm.server import VllmServer
from registry.errors import InvalidRecord, RemoteError
from registry.messages.node import StopInstance
from registry.records.engine import EngineKind
from tests.fixtures.fake_vllm import interpreter
from tests.fixtures.invoker import KIB, FakeCluster, image_of, make_image, start_request
from tests.fixtures.patience import until

pytestmark = pytest.mark.anyio
HEADER = b'{"__metadata__":{}}'
IMAGE = image_of(len(HEADER).to_bytes(8, "little") + HEADER.ljust(64 * KIB - 8, b" "))


@contextmanager
def host_of(folder: Path, python: Path, device: str = "cpu") -> Iterator[VllmHost]:
    tier = HostTier(folder / "shm" / "h0", 100 * KIB)
    for name in ("scratch", "models"):
        (folder / name).mkdir()
    folders = ModelFolders(tier, folder / "models")
    yield VllmHost(
        python=python,
        memory_bytes=1 << 30,
        device=device,
        scratch_dir=folder / "scratch",
        folders=folders,
        attach=folder / "attach.sock",
    )
    folders.close_all()
    tier.close()


def left_in(folder: Path) -> list[Path]:
    return [path for name in ("scratch", "models") for path in (folder / name).iterdir()]


async def test_a_check_leaves_nothing(tmp_path: Path) -> None:
    with host_of(tmp_path, interpreter(tmp_path)) as host:
        await host.check((), {})
        with pytest.raises(UnsupportedModel, match="unrecognized"):
            await host.check(("--no-such-argument",), {})
        assert not left_in(tmp_path)


async def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    request = start_request("i", None, assets={"lora/a/adapter_config.json": b"{}"})
    with host_of(tmp_path, Path("/bin/true")) as host:
        for _ in range(2):  # nor is its memory reserved
            with pytest.raises(InvalidRecord, match="r must be"):
                await host.start(request, make_image("a", KIB).ref(), lambda _: None)
        assert not left_in(tmp_path)


async def test_a_server_sees_the_gpus_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-b,6,GPU-d")
    python, lines = tmp_path / "python", list[str]()
    python.write_text('#!/bin/sh\necho "sees $CUDA_VISIBLE_DEVICES: $*"\n')
    python.chmod(0o755)
    request = start_request(
        "i", None, assets={"config.json": b"{}"}, engine_args=("--tensor-parallel-size", "2")
    )
    with host_of(tmp_path, python, "cuda:1,3") as host:
        server = await host.start(request, make_image("a", KIB).ref(), lines.append)
        await server.ended.wait()
        await server.aclose()
    (line,) = (line for line in lines if line.startswith("sees"))
    assert line.startswith("sees GPU-b,GPU-d: ") and line.endswith("--tensor-parallel-size 2")


async def test_a_server_that_ends_leaves_nothing(tmp_path: Path) -> None:
    with host_of(tmp_path, Path("/bin/true")) as host:
        server = await host.start(
            start_request("i", None, assets={"config.json": b"{}"}),
            make_image("a", KIB).ref(),
            lambda _: None,
        )
        assert len(left_in(tmp_path)) == 2
        await server.ended.wait()
        await server.aclose()
        assert not left_in(tmp_path)


def pipes() -> list[str]:
    """Return the open pipes of this process."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            found.append(str(link.readlink()))
    return [name for name in found if name.startswith("pipe:")]


async def test_a_cancelled_start_closes_its_pipe(tmp_path: Path) -> None:
    spec = VllmSpec(
        python=Path("/bin/true"),
        folder=tmp_path,
        scratch=tmp_path / "scratch",
        name="f",
        dtype="",
        context_length=0,
        max_sequences=1,
        device="cpu",
        memory_bytes=1 << 30,
    )

    async def start(turns: int) -> None:
        spec.scratch.mkdir(exist_ok=True)
        starting = asyncio.create_task(
            VllmServer.spawn(spec, lambda _: None, lambda: None, lambda: None), name="start"
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        if not starting.cancelled():
            await starting.result().aclose()

    await start(100)  # what a first process needs stays open
    before = len(pipes())
    for turns in range(6):
        await start(turns)
    await until(lambda: len(pipes()) <= before)


async def test_which_interpreter_has_a_module(tmp_path: Path) -> None:
    python = interpreter(tmp_path, plugin=False)
    assert await has_module(python, "vllm") and not await has_module(python, "hypercast_vllm")
    assert not await has_module(tmp_path / "none", "vllm") and not await has_module(
        Path("/bin/false"), "vllm"
    )


async def test_a_start_with_both_engines_fails_with_that_of_vllm(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    flags = ("--vllm-python", str(interpreter(tmp_path, gate=gate)), "--vllm-memory", "4GiB")
    vllm = partial(
        start_request, image=IMAGE, engine=EngineKind.VLLM, assets={"config.json": b'{"architectures":["A"]}'}
    )
    with gate.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # so that the first server keeps its memory
        async with FakeCluster(tmp_path) as cluster, cluster.node("n0", "h0", *flags) as node:
            await cluster.put(IMAGE)
            first = asyncio.create_task(node.ask(vllm("i1")))
            await until(lambda: first.done() or Path(f"{gate}.waiting").exists())
            with pytest.raises(RemoteError, match="exceeds --vllm-memory"):
                await node.ask(vllm("i2", native_first=True))
            await node.ask(StopInstance(instance_id="i1"))
            with pytest.raises(RemoteError, match="was stopped"):
                await first
