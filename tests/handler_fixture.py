"""A user's handler in a process of its own, for tests."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path

import psutil
import uvloop

from invoker.handlers.process import HandlerProcess
from registry.function_yaml import HandlerLimits, HandlerSpec
from tests.patience import PATIENCE_S

Scenario = Callable[[HandlerProcess], Awaitable[None]]


def on_loop(main: Coroutine[object, object, None]) -> None:
    """Run on the loop that a node runs on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def run(
    tmp_path: Path,
    source: str,
    scenario: Scenario,
    *,
    limits: HandlerLimits | None = None,
    env: dict[str, str] | None = None,
    files: dict[str, bytes] | None = None,
    logs: list[str] | None = None,
    start: Callable[..., None] = on_loop,
) -> None:
    """Start a handler with `source`, play `scenario`, stop it, and see that nothing is left."""
    spec = HandlerSpec(
        file="handler.py",
        function="handle",
        env=env or {},
        limits=limits or HandlerLimits(timeout_s=PATIENCE_S),
    )

    async def play() -> None:
        process = HandlerProcess((logs if logs is not None else []).append)
        try:
            await process.start({"handler.py": source.encode(), **(files or {})}, spec, tmp_path / "scratch")
            pid = process.pid
            await scenario(process)
        finally:
            await process.aclose()
        assert list((tmp_path / "scratch").iterdir()) == []
        assert pid is not None and not psutil.pid_exists(pid)

    start(play())


async def call(process: HandlerProcess, body: object, timeout_s: float = PATIENCE_S) -> list[object]:
    values: list[object] = []
    async with aclosing(process.invoke("r1", json.dumps(body).encode(), timeout_s)) as outputs:
        values.extend([json.loads(output.data) async for output in outputs])
    return values
