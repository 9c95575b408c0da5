"""Measure vLLM through Hypercast beside vLLM alone (`starts`), and beside the native engine (`speed`).

`starts`, of tiny-coder on this machine's processors, in turns: `vllm` is vLLM's own server on a folder;
`vllm-loader` the same with the weights from a node's memory (`--load-format hypercast`); `native-first` a
function with engine: vllm that sleeps, whose first request the native engine answers until vLLM is ready.
`ready_s` is until vLLM serves, `median_s` until the first token arrives.

`speed`, of a random Llama with 124 million parameters: `vllm` (in one process, without its server) and
`hypercast` (the native engine), for each batch and dtype. Rates are of the whole call with prompts.

example:
  python -m benchmarks.stock_engines --vllm-python .venv-vllm/bin/python --json stock.json
"""

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.engine.command import make_engine, run_engine
from benchmarks.harness.arguments import at_least, benchmark_parser, comma_list, some_of
from benchmarks.harness.local_platform import PLATFORM_FAILURES
from benchmarks.harness.processes import ROOT
from benchmarks.harness.random_model import llama_125m, random_model
from benchmarks.harness.records import Record, chosen, describe_run, recording, timed
from benchmarks.stock_engines.platform_start import PlatformStart, VllmPlatform
from benchmarks.stock_engines.vllm_server import ServerDied, StartTimes, start_once
from invoker.vllm.model_infos import ModelInfos

MODEL = ROOT / "functions" / "tiny-coder"
PARTS = ("starts", "speed")
PROMPT = (5, 6, 7, 8)
TOKENS = 900  # of a stream that goes on until vLLM has taken over
SPEED_IN_VLLM = Path(__file__).with_name("speed_in_vllm.py")


def main() -> None:
    parser = benchmark_parser(__spec__.name.rpartition(".")[0], __doc__)
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--parts", type=some_of(PARTS), default=list(PARTS), help="which to run")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--batch", type=comma_list(int), default=[1, 8])
    parser.add_argument("--dtype", type=some_of(("float32", "bfloat16")), default=["float32", "bfloat16"])
    parser.add_argument("--prompt", type=at_least(1), default=64, help="prompt tokens of `speed`")
    parser.add_argument("--tokens", type=at_least(2), default=64, help="output tokens of `speed`")
    args = parser.parse_args()
    args.vllm_python = args.vllm_python.absolute()
    failures = (*PLATFORM_FAILURES, ServerDied)
    with recording("stock_engines", json=args.json, show=_line, failures=failures) as kept:
        if "starts" in args.parts:
            kept.add(*_starts(args))
        if "speed" in args.parts:
            for record in _speed(args):
                kept.add(record)


def _line(record: Record) -> str:
    params = record["params"]
    if "tokens_per_s" in record:
        where = f"{params['dtype']} batch {params['batch']}"
        return f"{record['name']:14s} {where:18s} {record['tokens_per_s']:8.1f} tokens/s"
    gap = f", largest gap {record['largest_gap_s']:.2f} s" if "largest_gap_s" in record else ""
    return (
        f"{record['name']:14s} first token {record['median_s']:6.2f} s, vLLM {record['ready_s']:6.2f} s{gap}"
    )


def _starts(args: argparse.Namespace) -> Iterator[Record]:
    params = {
        "part": "starts",
        "model": "tiny-coder",
        **chosen(args, "rounds"),
        "run": describe_run(__name__),
    }
    alone, loader, platform = list[StartTimes](), list[StartTimes](), list[PlatformStart]()
    with TemporaryDirectory(prefix="hc-stock-") as folder:
        with VllmPlatform(Path(folder) / "data", args.vllm_python) as running:
            running.run("deploy", str(MODEL), "--name", "coder", "--engine", "vllm")
            source = Path(running.run("pull", "coder").strip())
            infos = ModelInfos()
            start_once(args.vllm_python, source, PROMPT, infos)
            for _ in range(args.rounds):
                alone.append(start_once(args.vllm_python, source, PROMPT, infos))
                loader.append(start_once(args.vllm_python, source, PROMPT, infos, loader={"model": "coder"}))
                platform.append(running.start("coder", PROMPT, TOKENS))
    for name, times in (("vllm", alone), ("vllm-loader", loader)):
        first_s = [one.first_token_s for one in times]
        yield timed(name, params, first_s, ready_s=statistics.median(one.ready_s for one in times))
    first_s = [one.first_token_s for one in platform]
    ready_s = statistics.median(one.ready_s for one in platform)
    gap_s = max(one.largest_gap_s for one in platform)
    same = len({tuple(one.tokens) for one in platform}) == 1
    yield timed("native-first", params, first_s, ready_s=ready_s, largest_gap_s=gap_s, same_tokens=same)


def _speed(args: argparse.Namespace) -> Iterator[Record]:
    with TemporaryDirectory(prefix="hc-stock-") as folder:
        for dtype in args.dtype:
            model = random_model(llama_125m(), dtype, "cpu", context=512)
            path = Path(folder) / dtype
            model.reference.save_pretrained(path)
            for batch in args.batch:
                yield _speed_record("vllm", args, dtype, batch, _vllm_rounds(args, path, dtype, batch))
                engine = make_engine(model, batch)
                rounds = []
                try:
                    for _ in range(args.rounds + 1):
                        began = time.perf_counter()
                        run_engine(engine, _prompts(args.prompt, batch), args.tokens)
                        rounds.append(time.perf_counter() - began)
                finally:
                    engine.close()
                yield _speed_record("hypercast", args, dtype, batch, rounds[1:])


def _speed_record(
    name: str, args: argparse.Namespace, dtype: str, batch: int, seconds: Sequence[float]
) -> Record:
    given = chosen(args, "prompt", "tokens", "rounds")
    params = {"part": "speed", "dtype": dtype, "batch": batch, **given, "run": describe_run(__name__)}
    rate = batch * args.tokens / statistics.median(seconds)
    return timed(name, params, seconds, tokens_per_s=rate)


def _prompts(length: int, batch: int) -> list[list[int]]:
    """Return the prompts that speed_in_vllm.py makes, too."""
    return [[(7 * i + 31 * row + 3) % 31_000 for i in range(length)] for row in range(batch)]


def _vllm_rounds(args: argparse.Namespace, path: Path, dtype: str, batch: int) -> list[float]:
    """Return the seconds of vLLM's rounds. Raises ServerDied."""
    request = {
        "model": str(path),
        "dtype": dtype,
        "batch": batch,
        **chosen(args, "prompt", "tokens", "rounds"),
    }
    done = subprocess.run(
        [str(args.vllm_python), str(SPEED_IN_VLLM)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ServerDied(done.stderr[-2000:])
    return [json.loads(line)["seconds"] for line in done.stdout.splitlines() if line.startswith("{")]
