"""Casts along leaf switches, on a whole platform as users run it."""

import asyncio
from pathlib import Path

from registry.records.cast import CastState, CastStatus
from registry.redis.state import RedisState
from tests.fixtures.platform import Platform

MODEL = "tiny-coder"
LEAVES = {"node-0": "leaf-0", "node-1": "leaf-0", "node-2": "leaf-1", "node-3": "leaf-1"}


def latest_cast(platform: Platform) -> CastStatus | None:
    async def read() -> list[CastStatus]:
        async with RedisState.connect(f"unix://{platform.data / 'redis.sock'}") as state:
            return await state.casts()

    return next(iter(asyncio.run(read())), None)


def test_one_copy_goes_to_each_leaf_without_one(tmp_path: Path, root: Path) -> None:
    flags = ("--nodes", "4", "--hosts", "4", "--leaves", "2", "--link-rate", "100mbit")
    platform = Platform(data=tmp_path / "data", flags=flags)
    platform.up()
    try:
        platform.run("deploy", str(root / "functions" / MODEL))
        assert {node["id"]: node["leaf"] for node in platform.nodes()} == LEAVES
        platform.run("scale", MODEL, "--instances", "4")

        def complete() -> CastStatus | None:
            status = latest_cast(platform)
            if status is None:
                return None
            ended = [one for one in status.progress if one.state is CastState.COMPLETE]
            return status if len(ended) == len(status.record.targets) else None

        status = platform.until("the cast is complete", complete)
        record = status.record
        assert record.planner == "multi-chain" and "between 2 leaf switches" in record.reason
        assert {one.node: one.leaf for one in record.members}.items() <= LEAVES.items()
        crossed = sum(
            nbytes
            for one in status.progress
            for peer, nbytes in one.pulled.items()
            if LEAVES[peer] != LEAVES[one.node]
        )
        assert crossed == record.nbytes
    finally:
        platform.down()
