"""Replay a request trace against a running gateway, open-loop, and verify its billing afterwards.

Each request is sent at its time in the trace, whether or not earlier ones are complete. Prompts are token
ids, trimmed to the function's context; outputs have the trace's exact length. Time to first token and time
per output token are measured at the client. Afterwards the ledger must hold exactly one record with the
correct token counts for each successful request, its sums must match, and all accelerator time must be
accounted for (`hypercast usage check`). Needs an admin key.

example:
  python -m benchmarks.replay --trace benchmarks/data/azure-llm-2023-conv.csv.gz --speedup 4 --seconds 300
      --function tiny-coder --json replay.json --plot replay.png
"""

import argparse
import asyncio
import math
import os
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.harness.admin_client import AdminClient
from benchmarks.harness.arguments import benchmark_parser, positive, say
from benchmarks.harness.http_exchange import HttpEndpoint
from benchmarks.harness.ledger_check import LedgerComparison, compare_ledger
from benchmarks.harness.local_platform import PlatformStateError
from benchmarks.harness.open_loop import PromptPool, Replay
from benchmarks.harness.percentile import percentile
from benchmarks.harness.records import chosen, describe_run, new_figure, recording, save_figure
from benchmarks.harness.traces import InvalidTrace, TrimmedTrace, read_trace, trim_to_context

FAILURES = (InvalidTrace, PlatformStateError, OSError, ValueError)
PROGRESS_S = 15.0


def result(
    replay: Replay, cap: TrimmedTrace, ledger: LedgerComparison | None, params: dict[str, Any]
) -> dict[str, Any]:
    """Build the record."""
    good = [done for done in replay.finished if not done.failure]
    ttft_s = [done.ttft_s for done in good]
    tpot_s = [done.tpot_s for done in good if done.tpot_s is not None]
    tokens = sum(done.completion_tokens for done in good)
    return {
        "name": "replay",
        "params": params,
        "requests": replay.sent,
        "failed": len(replay.finished) - len(good),
        "unfinished": replay.sent - len(replay.finished),
        "failures": dict(Counter(done.failure for done in replay.finished if done.failure)),
        "prompts_capped": cap.prompts_capped,
        "outputs_capped": cap.outputs_capped,
        "wall_s": round(replay.wall_s, 3),
        "output_tokens_per_s": round(tokens / replay.wall_s, 1),
        "seconds": [round(value, 6) for value in ttft_s],
        "median_s": percentile(ttft_s, 50),
        **{f"ttft_p{share}_s": percentile(ttft_s, share) for share in (50, 90, 95, 99)},
        "tpot_p50_s": percentile(tpot_s, 50),
        "tpot_p99_s": percentile(tpot_s, 99),
        "start_kinds": dict(Counter(done.start_kind for done in good)),
        "client_late_p99_s": percentile(replay.late_s, 99),
        "client_processor_share": round(replay.cpu_s / replay.wall_s, 3),
        "interrupted": replay.interrupted,
        "ledger_ok": None if ledger is None else ledger.ok,
        "ledger": None if ledger is None else ledger.record(),
    }


def show(row: dict[str, Any]) -> str:
    """Format the record as a few lines."""

    def ms(name: str) -> str:
        return "-" if row[name] is None else f"{row[name] * 1e3:.1f} ms"

    verdicts = {
        None: "not checked" if row["ledger"] is None else "not settled yet",
        True: "exact",
        False: "NOT exact",
    }
    return "\n".join(
        [
            f"{row['requests']} requests in {row['wall_s']:.1f} s, {row['failed']} failed, "
            f"{row['unfinished']} unfinished {row['failures'] or ''}",
            f"time to first token: p50 {ms('ttft_p50_s')}, p90 {ms('ttft_p90_s')}, p95 {ms('ttft_p95_s')}, "
            f"p99 {ms('ttft_p99_s')}",
            f"time per output token: p50 {ms('tpot_p50_s')}; {row['output_tokens_per_s']:.0f} tokens/s",
            f"starts: {', '.join(f'{kind} {count}' for kind, count in row['start_kinds'].items())}",
            f"trimmed to the context: {row['prompts_capped']} prompts, {row['outputs_capped']} outputs",
            f"client: {row['client_processor_share']:.0%} of a CPU, p99 {ms('client_late_p99_s')} late",
            f"ledger: {verdicts[row['ledger_ok']]} {row['ledger'] or ''}",
        ]
    )


async def watch(replay: Replay) -> None:
    """Print progress to stderr until cancelled."""
    while True:
        await asyncio.sleep(PROGRESS_S)
        failed = sum(bool(done.failure) for done in replay.finished)
        counts = f"{replay.sent}/{len(replay.arrivals)} sent, {len(replay.finished)} done"
        say(f"{counts}, {failed} failed")


async def replay_trace(args: argparse.Namespace) -> tuple[dict[str, Any], Replay]:
    """Replay the trace, then compare the ledger."""
    window = [arrival for arrival in read_trace(args.trace) if arrival.offset_s < args.seconds]
    async with AdminClient.connect(args.url, args.api_key) as admin:
        context = await admin.context_length(args.function)
        cap = (
            trim_to_context(window, context)
            if context
            else TrimmedTrace(arrivals=tuple(window), prompts_capped=0, outputs_capped=0)
        )
        replay = Replay(
            run=f"replay-{secrets.token_hex(4)}",
            target=HttpEndpoint.of(args.url, args.api_key),
            functions=(args.function,),
            arrivals=cap.arrivals,
            speedup=args.speedup,
            prompts=PromptPool.of(args.vocabulary, max(a.prompt_tokens for a in cap.arrivals)),
        )
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
        watching = asyncio.create_task(watch(replay))
        try:
            await replay.go(stop)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        ledger = None
        if not replay.interrupted:
            say("comparing the ledger")
            ledger = await compare_ledger(admin, [args.function], replay.finished, wait_s=args.check_wait)
    params = {
        "trace": args.trace.name,
        **chosen(args, "speedup", "seconds", "function"),
        "context_length": context,
        **describe_run("benchmarks.replay"),
    }
    return result(replay, cap, ledger, params), replay


def plot(replay: Replay, row: dict[str, Any], path: Path) -> None:
    """Draw time to first token over time, and its distribution, as PNG."""
    good = [done for done in replay.finished if not done.failure]
    figure = new_figure(11, 4)
    over, share = figure.subplots(1, 2)
    for kind in sorted({done.start_kind for done in good}):
        of_kind = [done for done in good if done.start_kind == kind]
        moments_s = [replay.moments_s[done.request_id] for done in of_kind]
        over.plot(moments_s, [done.ttft_s for done in of_kind], ".", markersize=3, label=kind)
    over.set(xlabel="seconds since the first request", ylabel="time to first token, s", yscale="log")
    if good:
        over.legend()
    ordered = sorted(done.ttft_s for done in good)
    share.plot(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))])
    share.set(xlabel="time to first token, s", ylabel="share of requests", xscale="log", ylim=(0, 1))
    params = row["params"]
    figure.suptitle(
        f"{params['trace']} at {params['speedup']:g}x on {params['function']}: {row['requests']} requests"
    )
    save_figure(figure, path)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser("benchmarks.replay", __doc__, plot=True)
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="in Azure's, our compact or the plain format, or .gz")
    add("--function", required=True, help="NAME or NAME:VERSION")
    add("--speedup", type=positive, default=1.0, help="replay this many times faster")
    add("--seconds", type=positive, default=math.inf, help="replay these first seconds of the trace")
    url, key = os.environ.get("HYPERCAST_URL"), os.environ.get("HYPERCAST_API_KEY")
    add("--url", default=url or "http://127.0.0.1:8000", help="the gateway, by default $HYPERCAST_URL")
    add("--api-key", default=key or "", help="an admin key, by default $HYPERCAST_API_KEY")
    add("--vocabulary", type=int, default=256, help="token ids are below this")
    add("--check-wait", type=float, default=90.0, help="seconds until nodes have written their time")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    with recording("replay", json=args.json, show=show, failures=FAILURES) as out:
        row, replay = uvloop.run(replay_trace(args))
        out.add(row)
        if args.plot:
            plot(replay, row, args.plot)
    if row["interrupted"]:
        sys.exit(130)
    sys.exit(0 if not row["failed"] and row["ledger_ok"] else 1)


if __name__ == "__main__":
    main()
