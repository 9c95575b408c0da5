"""Nodes with an emulated accelerator: real starts, casts and streams, and clear errors."""

from pathlib import Path

import pytest

from invoker.__main__ import engines_for
from invoker.base.errors import SettingsError
from invoker.device import detect_device
from invoker.emulated.arrival import ImageIncomplete
from invoker.emulated.engines import EmulatedEngineFactory
from invoker.emulated.tokens import continuation
from invoker.engine.contract import ModelSpec, UnsupportedModel
from invoker.engine.factory import TorchEngineFactory
from invoker.engine.image_ranges import layer_byte_ranges
from invoker.settings import parse_settings
from registry.errors import RemoteError
from registry.images.manifest import UNIT_BYTES
from registry.messages.node import StartInstance, Tokens
from tests.fixtures.emulated import DEVICE, emulated_image
from tests.fixtures.engine import MemoryRegion
from tests.fixtures.invoker import PROMPT, FakeCluster, generate, make_image, start_request, started

EMULATED = ("--device", str(DEVICE), "--gpu-memory", "8MB")


def start(name: str, *holders: object) -> StartInstance:
    return start_request(
        name,
        emulated_image(),
        *holders,  # type: ignore[arg-type]
        dtype="bfloat16",
        context_length=256,
    )


@pytest.mark.anyio
async def test_nodes_send_each_other_the_image_and_generate_the_same(tmp_path: Path) -> None:
    image = emulated_image()
    async with FakeCluster(tmp_path) as cluster:
        await cluster.put(image)
        engines = [EmulatedEngineFactory(DEVICE), EmulatedEngineFactory(DEVICE)]
        async with (
            cluster.node("n0", "h0", *EMULATED, engines=engines[0]) as first,  # type: ignore[arg-type]
            cluster.node("n1", "h1", *EMULATED, engines=engines[1]) as second,  # type: ignore[arg-type]
        ):
            assert started(await first.ask(start("i0"))).start_kind == "cold"
            await second.ask(start("i1", await first.holder()))
            record = await second.record()
            assert record.device == "emulated:h800/10000" and record.gpu_type == "emulated-h800"
            assert record.gpu_bytes == 8_000_000
            assert record.counters["cast_recv_bytes"] == len(image.data)
            assert record.counters["disk_read_bytes"] == 0
            for node, name in ((first, "i0"), (second, "i1")):
                replies = await node.ask(generate(name, request=name, tokens=7))
                found = [token for reply in replies if isinstance(reply, Tokens) for token in reply.ids]
                assert found == continuation(PROMPT, 7, 32000, generate(name, tokens=7).sampling)


@pytest.mark.anyio
async def test_a_real_model_is_refused_by_an_emulated_node(tmp_path: Path) -> None:
    image = make_image("real", 2 * UNIT_BYTES)
    async with FakeCluster(tmp_path) as cluster:
        await cluster.put(image)
        engines = EmulatedEngineFactory(DEVICE)
        async with cluster.node("n0", "h0", *EMULATED, engines=engines) as node:  # type: ignore[arg-type]
            with pytest.raises(RemoteError, match="emulated:h800/10000 runs emulated models only"):
                await node.ask(start_request("i0", image))


@pytest.mark.anyio
async def test_an_emulated_model_is_refused_by_a_real_node(tmp_path: Path) -> None:
    async with FakeCluster(tmp_path) as cluster:
        await cluster.put(emulated_image())
        async with cluster.node("n0", "h0", engines=TorchEngineFactory()) as node:  # type: ignore[arg-type]
            with pytest.raises(RemoteError, match="llama2-7b/10000 runs on emulated devices only"):
                await node.ask(start("i0"))


def test_devices_are_checked_in_the_settings() -> None:
    def device(text: str) -> str:
        argv = ["--redis-url", "unix:///none", "--device", text]
        return parse_settings(argv, {"HYPERCAST_CLUSTER_SECRET": "x" * 32}).device

    assert device("emulated:h800x4/1000/10") == "emulated:h800x4/1000/10"
    for text, words in (("emulated:tpu", "no emulated device 'tpu'"), ("emulated:h800/x", "emulated:GPU")):
        with pytest.raises(SettingsError, match=words):
            device(text)
    facts = detect_device("emulated:h800x4/1000/10")
    assert (facts.gpu_type, facts.memory_bytes) == ("emulated-h800", 320_000_000)
    assert isinstance(engines_for("emulated:h800"), EmulatedEngineFactory)
    assert isinstance(engines_for("cpu"), TorchEngineFactory)


def test_a_stage_binds_only_what_has_arrived() -> None:
    image, engines = emulated_image(), EmulatedEngineFactory(DEVICE)
    region = MemoryRegion(len(image.data))
    for first, last in layer_byte_ranges(image.manifest, 8, 20):
        region.buffer[first:last] = image.data[first:last]

    def spec(layers: tuple[int, int] | None) -> ModelSpec:
        return ModelSpec(
            manifest=image.manifest, config={}, dtype="bfloat16", context_length=256, layers=layers
        )

    least, _ = engines.kv_bytes(spec((8, 20)), 4)
    stage = engines.make_stage(spec((8, 20)), region, MemoryRegion(least))
    assert (stage.layers, stage.has_head, stage.pages) == ((8, 20), False, 16)
    for layers in ((0, 20), (8, 32), None):
        with pytest.raises(ImageIncomplete, match="have not arrived"):
            engines.make_stage(spec(layers), region, MemoryRegion(least))
    with pytest.raises(UnsupportedModel, match="runs on emulated devices only"):
        TorchEngineFactory().kv_bytes(spec(None), 4)
