"""Calls that leave a pipeline take their K and V along, or are run again: no token changes."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from registry.messages.live import MOVED, HandOffCalls
from registry.messages.node import Generate
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.stages import (
    CUTS,
    Answer,
    LiveCluster,
    answer,
    goes_on,
    let_serve,
    live_cluster,
    open_pipeline,
    requests_for,
)

TOKENS = 100  # so many that calls are at work still when they are asked to leave
ALWAYS = ("--kv-moves", "always")


async def _started(live: LiveCluster, requests: Sequence[Generate], leaving: Sequence[str]) -> list[Answer]:
    """Return the pipeline's replies until all requests, or the named ones, moved.

    The middle node has loaded the whole model by then.
    """
    let_serve(live)
    seen: asyncio.Queue[int] = asyncio.Queue()
    async with open_pipeline(live, CUTS):
        running = [asyncio.create_task(answer(live.head.node, one, seen)) for one in requests]
        for _ in range(5 * len(requests)):
            await seen.get()
        await live.nodes[1].until_ready()
        if leaving:
            await live.head.node.ask(HandOffCalls(pipeline="p", epoch=0, request_ids=tuple(leaving)))
            await asyncio.gather(*running)
    return await asyncio.gather(*running)


async def _all_tokens(
    live: LiveCluster, leaving: Sequence[str] = (), broken: bool = False
) -> tuple[list[Answer], dict[str, list[int]]]:
    """Return the answers, and all tokens of each request; the middle node generates the rest."""
    requests = requests_for(live, 5, tokens=TOKENS)
    answers = await _started(live, requests, leaving)

    async def rest(request: Generate, got: Answer) -> list[int]:
        kv = got.kv
        if broken and kv is not None:
            gone = msgspec.structs.replace(kv.stages[0], link="tcp://127.0.0.1:1")
            kv = msgspec.structs.replace(kv, stages=(gone, *kv.stages[1:]))
        return await goes_on(live.nodes[1], request, got, kv)

    # At once: the stages keep what calls have left for some seconds only.
    ids = await asyncio.gather(*map(rest, requests, answers))
    whole = {request.request_id: one for request, one in zip(requests, ids, strict=True)}
    assert whole == live.expected(requests)
    return answers, whole


def _moved(answers: Sequence[Answer]) -> list[Answer]:
    found = [got for got in answers if got.finish_reason == MOVED]
    assert found, "all calls had ended before they were asked to leave"
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "gpt2"])
def test_calls_take_their_kv_along(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "invoker.stages")

    async def main() -> list[Answer]:
        async with (
            asyncio.timeout(3 * PATIENCE_S),
            live_cluster(tmp_path, kind, 3, flags=ALWAYS) as live,
        ):
            return (await _all_tokens(live, ("r1", "r2", "r4")))[0]

    moved = _moved(asyncio.run(main()))
    reported = [record.getMessage() for record in caplog.records]
    # One after the other, though all were asked for at once.
    brought = [line for line in reported if "transfer: always" in line or "loaded K and V" in line]
    assert ["loaded K and V" in line for line in brought] == [False, True] * len(moved)


def test_a_pipeline_that_ends_leaves_kv_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "invoker.stages")

    async def main() -> list[Answer]:
        async with asyncio.timeout(3 * PATIENCE_S), live_cluster(tmp_path, "llama", 3, flags=ALWAYS) as live:
            return (await _all_tokens(live))[0]

    moved = _moved(asyncio.run(main()))
    assert all(got.kv is not None and len(got.kv.stages) == 3 for got in moved)
    reported = [record.getMessage() for record in caplog.records]
    assert sum("loaded K and V" in line for line in reported) == len(moved)


def test_a_pipeline_that_is_formed_anew_keeps_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All are to leave: what goes on in the next pipeline is computed there, and nobody waits for it."""
    caplog.set_level(logging.INFO, "invoker.stages")

    async def main() -> list[Answer]:
        async with asyncio.timeout(3 * PATIENCE_S), live_cluster(tmp_path, "llama", 3, flags=ALWAYS) as live:
            requests = requests_for(live, 3, tokens=TOKENS)
            let_serve(live)
            seen: asyncio.Queue[int] = asyncio.Queue()
            async with open_pipeline(live, CUTS):
                running = [asyncio.create_task(answer(live.head.node, one, seen)) for one in requests]
                for _ in range(5 * len(requests)):
                    await seen.get()
                await live.nodes[1].until_ready()
                await live.head.node.ask(HandOffCalls(pipeline="p", epoch=0))
                answers = await asyncio.gather(*running)
            pairs = zip(requests, answers, strict=True)
            rest = await asyncio.gather(*(goes_on(live.nodes[1], one, got, got.kv) for one, got in pairs))
            whole = {request.request_id: one for request, one in zip(requests, rest, strict=True)}
            assert whole == live.expected(requests)
            return answers

    assert all(got.kv is None for got in _moved(asyncio.run(main())))
    assert not any("call " in record.getMessage() for record in caplog.records)


def test_kv_that_does_not_come_is_computed_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "invoker.stages")

    async def main() -> list[Answer]:
        async with asyncio.timeout(3 * PATIENCE_S), live_cluster(tmp_path, "gpt2", 3, flags=ALWAYS) as live:
            return (await _all_tokens(live, ("r0", "r3"), broken=True))[0]

    moved = _moved(asyncio.run(main()))
    reported = [record.getMessage() for record in caplog.records]
    assert sum("recomputing" in line for line in reported) == len(moved)
    assert not any("loaded K and V" in line for line in reported)


@pytest.mark.parametrize("policy", ["auto", "never"])
def test_whatever_is_decided_the_tokens_are_the_same(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "invoker.stages")

    async def main() -> list[Answer]:
        flags = ("--kv-moves", policy)
        async with asyncio.timeout(3 * PATIENCE_S), live_cluster(tmp_path, "llama", 3, flags=flags) as live:
            return (await _all_tokens(live, ("r1", "r2")))[0]

    moved = _moved(asyncio.run(main()))
    reported = [record.getMessage() for record in caplog.records]
    decided = [line for line in reported if ": transfer: " in line or ": recompute: " in line]
    assert len(decided) == len(moved)
    if policy == "never":
        assert all(line.endswith("recompute: always") for line in decided)
    else:
        assert all(": recomputing " in line for line in decided)
