"""Send a trace open-loop and report each answer, then compare the ledger.

    python -m benchmarks.trace.client SOCKET RANK URL KEY

Progress goes to stderr.
"""

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any

import msgspec
import uvloop

from benchmarks.harness.admin_client import AdminClient
from benchmarks.harness.arguments import say
from benchmarks.harness.crew_member import serve_async
from benchmarks.harness.crew_messages import CrewMessage, CrewProtocol, MemberHello
from benchmarks.harness.http_exchange import HttpEndpoint
from benchmarks.harness.ledger_check import UsageReports, compare_ledger
from benchmarks.harness.open_loop import PromptPool, Replay
from benchmarks.harness.percentile import percentile
from benchmarks.harness.processor import ProcessorTimes, read_times, saturated_share
from benchmarks.harness.stream_client import StreamResult
from benchmarks.harness.traces import TraceRequest
from invoker.emulated.tokens import FIRST_TOKEN

PROGRESS_S = 10.0
_NICENESS = -20  # requests must not be late because nodes compute
_CHECK_S = 60.0


class SendTrace(CrewMessage, frozen=True, kw_only=True):
    """Send these (second, prompt tokens, output tokens, function), then report; answered by TraceSent.

    The window lasts `window_s` from the first second, however long answers take.
    """

    functions: list[str]
    arrivals: list[tuple[float, int, int, int]]
    vocabulary: int
    window_s: float


class StreamedAnswer(msgspec.Struct, kw_only=True, array_like=True):
    """One request, in seconds since the window began; `gaps_us` are microseconds between tokens."""

    due_s: float
    first_s: float
    last_s: float
    tokens: int
    start_kind: str
    failure: str
    gaps_us: list[int]
    function: int = 0


class TraceSent(CrewMessage, frozen=True, kw_only=True):
    """The answers, and the use of GPUs in the window.

    `started_s` is on the machine's monotonic clock, `ended_s` since then. `late_s` is the 99th percentile of
    how late requests were sent, `processor_share` the use of processors until the last one was due, and
    `saturated_share` the share of that time, by seconds, in which they had hardly any left.
    """

    started_s: float
    ended_s: float
    answers: list[StreamedAnswer]
    late_s: float
    processor_share: float
    saturated_share: float
    gpu_s: float
    loading_s: float
    busy_s: float
    ledger: dict[str, Any]
    ledger_ok: bool


PROTOCOL = CrewProtocol.of(SendTrace, TraceSent)


async def send(
    url: str,
    key: str,
    order: SendTrace,
    *,
    connect: Callable[[str, str], AbstractAsyncContextManager[UsageReports]] = AdminClient.connect,
    processors: Callable[[], ProcessorTimes] = read_times,
) -> TraceSent:
    """Carry out the order; `connect` opens the platform's reports."""
    arrivals = [TraceRequest(*one) for one in order.arrivals]
    prompts = PromptPool.of(order.vocabulary, max(one.prompt_tokens for one in arrivals), FIRST_TOKEN)
    replay = Replay(
        run="trace",
        target=HttpEndpoint.of(url, key),
        functions=order.functions,
        arrivals=arrivals,
        speedup=1.0,
        prompts=prompts,
    )
    replay.prepare()
    gc.freeze()
    watching = asyncio.create_task(_watch(replay))
    began_at, started_s, started_perf_s = time.time(), time.monotonic(), time.perf_counter()
    using = asyncio.create_task(_processor_use(arrivals[-1].offset_s, processors))
    await replay.go(asyncio.Event())
    await asyncio.sleep(max(0.0, started_s + order.window_s - time.monotonic()))
    used = await using
    watching.cancel()
    async with connect(url, key) as admin:
        ledger = await compare_ledger(admin, order.functions, replay.finished, wait_s=_CHECK_S)
        gpu = await admin.gpu_time(began_at, began_at + order.window_s)
    return TraceSent(
        started_s=started_s,
        ended_s=order.window_s,
        answers=[_answer(done, _function(replay, done), started_perf_s) for done in replay.finished],
        late_s=percentile(replay.late_s, 99) or 0.0,
        processor_share=used[-1].since(used[0]).share,
        saturated_share=saturated_share(used),
        gpu_s=gpu["allocated_ms"] / 1e3,
        loading_s=gpu["loading_ms"] / 1e3,
        busy_s=gpu["used_ms"] / 1e3,
        ledger=ledger.record(),
        ledger_ok=bool(ledger.ok),
    )


def _function(replay: Replay, done: StreamResult) -> int:
    return replay.arrivals[int(done.request_id.rpartition("-")[2])].function


def _answer(done: StreamResult, function: int, started_s: float) -> StreamedAnswer:
    return StreamedAnswer(
        due_s=done.due_s - started_s,
        first_s=done.first_s - started_s,
        last_s=done.last_s - started_s,
        tokens=done.completion_tokens,
        start_kind=done.start_kind,
        failure=done.failure,
        gaps_us=[round(gap_s * 1e6) for gap_s in done.gaps_s],
        function=function,
    )


async def _processor_use(seconds: float, processors: Callable[[], ProcessorTimes]) -> list[ProcessorTimes]:
    """Read what the machine's processors do now, each second, and after some seconds."""
    until_s, reads = time.monotonic() + seconds, [processors()]
    while (left_s := until_s - time.monotonic()) > 0:
        await asyncio.sleep(min(left_s, 1.0))
        reads.append(processors())
    return reads


async def _watch(replay: Replay) -> None:
    """Print progress until cancelled."""
    while True:
        await asyncio.sleep(PROGRESS_S)
        failed = [done.failure for done in replay.finished if done.failure]
        counts = f"{replay.sent}/{len(replay.arrivals)} sent, {len(replay.finished)} done"
        say(f"    {counts}, {len(failed)} failed {failed[:1] or ''}")


def main() -> None:
    path, rank, url, key = sys.argv[1:]
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    uvloop.run(serve_async(path, MemberHello(rank=int(rank)), PROTOCOL, partial(send, url, key)))


if __name__ == "__main__":
    main()
