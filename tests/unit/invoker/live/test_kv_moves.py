"""Calls that leave a pipeline take their K and V along, or are run again: no token changes."""

import asyncio
import logging
from collections.abc import Callable, Sequence
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


async def _started(
    live: LiveCluster, requests: Sequence[Generate], leaving: Sequence[str] | None
) -> list[Answer]:
    """Return the pipeline's replies until its end, or until the named requests, or all (None), moved.

    The middle node has loaded the whole model by then.
    """
    let_serve(live)
    seen: asyncio.Queue[int] = asyncio.Queue()
    async with open_pipeline(live, CUTS):
        running = [asyncio.create_task(answer(live.head.node, one, seen)) for one in requests]
        for _ in range(5 * len(requests)):
            await seen.get()
        await live.nodes[1].until_ready()
        if leaving is None or leaving:
            named = {} if leaving is None else {"request_ids": tuple(leaving)}
            await live.head.node.ask(HandOffCalls(pipeline="p", epoch=0, **named))
            await asyncio.gather(*running)
    return await asyncio.gather(*running)


async def _all_tokens(live: LiveCluster, leaving: Sequence[str] | None, broken: bool) -> list[Answer]:
    """Return the answers, once the middle node has generated the rest of each."""
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
    return answers


async def _moved(
    folder: Path, kind: str, leaving: Sequence[str] | None, policy: str = "always", *, broken: bool = False
) -> list[Answer]:
    """Return the answers of the calls that moved. They are `broken`: their K and V are not to be had."""
    async with (
        asyncio.timeout(3 * PATIENCE_S),
        live_cluster(folder, kind, 3, flags=("--kv-moves", policy)) as live,
    ):
        answers = await _all_tokens(live, leaving, broken)
    found = [got for got in answers if got.finish_reason == MOVED]
    assert found, "all calls had ended before they were asked to leave"
    return found


@pytest.fixture
def reported(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "invoker.stages")
    return lambda: [record.getMessage() for record in caplog.records]


Lines = Callable[[], list[str]]


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "gpt2"])
async def test_calls_take_their_kv_along(tmp_path: Path, kind: str, reported: Lines) -> None:
    moved = await _moved(tmp_path, kind, ("r1", "r2", "r4"))
    # One after the other, though all were asked for at once.
    brought = [line for line in reported() if "transfer: always" in line or "loaded K and V" in line]
    assert ["loaded K and V" in line for line in brought] == [False, True] * len(moved)


async def test_a_pipeline_that_ends_leaves_kv_too(tmp_path: Path, reported: Lines) -> None:
    moved = await _moved(tmp_path, "llama", ())
    assert all(got.kv is not None and len(got.kv.stages) == 3 for got in moved)
    assert sum("loaded K and V" in line for line in reported()) == len(moved)


async def test_a_pipeline_that_is_formed_anew_keeps_nothing(tmp_path: Path, reported: Lines) -> None:
    """All are to leave: what goes on in the next pipeline is computed there, and nobody waits for it."""
    assert all(got.kv is None for got in await _moved(tmp_path, "llama", None))
    assert not any("call " in line for line in reported())


async def test_kv_that_does_not_come_is_computed_anew(tmp_path: Path, reported: Lines) -> None:
    moved = await _moved(tmp_path, "gpt2", ("r0", "r3"), broken=True)
    assert sum("recomputing" in line for line in reported()) == len(moved)
    assert not any("loaded K and V" in line for line in reported())


@pytest.mark.parametrize(("policy", "outcome"), [("auto", ": recomputing "), ("never", "recompute: always")])
async def test_whatever_is_decided_the_tokens_are_the_same(
    tmp_path: Path, policy: str, outcome: str, reported: Lines
) -> None:
    moved = await _moved(tmp_path, "llama", ("r1", "r2"), policy)
    decided = [line for line in reported() if ": transfer: " in line or ": recompute: " in line]
    assert len(decided) == len(moved)
    assert all(outcome in line if policy == "auto" else line.endswith(outcome) for line in decided)
