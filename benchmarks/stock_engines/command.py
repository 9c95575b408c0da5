"""Measure vLLM through Hypercast beside vLLM alone (`starts`), and beside the native engine (`speed`).

`starts`, of tiny-coder on this machine's processors, in turns beside an idle platform: `vllm` is vLLM's
server on a folder with the flags and the environment of a node's servers; `vllm-defaults` the same with
vLLM's own (but for --dtype, --enforce-eager and the size of its KV cache on a CPU); `vllm-loader` is `vllm`
with the weights from a node's memory (`--load-format hypercast`); `native-first` a function with engine: vllm
that is scaled to zero, whose requests the native engine answers until vLLM is ready. `ready_s` is until vLLM
serves, `median_s` until the first token arrives.

The client of `native-first` streams all the time, as vLLM's start takes longer than the model's context
lasts: one stream after the other, until one has ended after vLLM became ready (`stream_s`; `streams` counts
them). `largest_gap_s` is between two tokens of one stream, `gap_at_switch_s` within 2 s of `ready_s`,
`same_tokens` whether all streams have the tokens of one that vLLM makes alone.

`speed`, of a random Llama with 124 million parameters: `vllm` (in one process, without its server, eagerly
as on a node), `vllm-compiled` (as vLLM does by default; up to a minute each) and `hypercast` (the native
engine), for each batch and dtype. Rates are of the whole call with prompts. All compute with --threads
threads, whatever OMP_NUM_THREADS is. Without a C++ compiler vLLM compiles nothing: such a record has the
reason, `failed`, and no rate.

example:
  python -m benchmarks.stock_engines --vllm-python .venv-vllm/bin/python --json stock.json
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.engine.command import make_engine, run_engine
from benchmarks.harness.arguments import at_least, benchmark_parser, comma_list, some_of
from benchmarks.harness.event_stream import StreamFailed
from benchmarks.harness.local_platform import PLATFORM_FAILURES, running_platform
from benchmarks.harness.processes import ROOT
from benchmarks.harness.random_model import RandomModel, llama_125m, random_model
from benchmarks.harness.records import Record, chosen, describe_run, recording, timed
from benchmarks.stock_engines.platform_start import PlatformStart, start_from_zero, stream_from_vllm
from benchmarks.stock_engines.vllm_server import ServerDied, StartTimes, start_once
from invoker.device import usable_cores
from invoker.vllm.model_infos import ModelInfos

MODULE = "benchmarks.stock_engines"
MODEL = ROOT / "functions" / "tiny-coder"
PARTS = ("starts", "speed")
ENGINES = ("vllm", "vllm-compiled", "hypercast")
PROMPT = (5, 6, 7, 8)
TOKENS = 1000  # of a stream: nearly the whole context of the model
SPEED_IN_VLLM = Path(__file__).with_name("speed_in_vllm.py")


class CompilerFailed(Exception):
    """There is no C++ compiler, or it fails: vLLM cannot compile the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRun:
    """The rounds of one engine with a batch size, and the threads that torch computed with."""

    threads: int
    seconds: Sequence[float]


def main() -> None:
    parser = benchmark_parser(MODULE, __doc__)
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--parts", type=some_of(PARTS), default=list(PARTS), help="which to run")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    threads = "of torch in vLLM and in the native engine (not in the node of `starts`, which takes all)"
    parser.add_argument("--threads", type=at_least(1), default=usable_cores(), help=threads)
    parser.add_argument("--engines", type=some_of(ENGINES), default=list(ENGINES), help="of `speed`")
    parser.add_argument("--batch", type=comma_list(int), default=[1, 8])
    parser.add_argument("--dtype", type=some_of(("float32", "bfloat16")), default=["float32", "bfloat16"])
    parser.add_argument("--prompt", type=at_least(1), default=64, help="prompt tokens of `speed`")
    parser.add_argument("--tokens", type=at_least(2), default=64, help="output tokens of `speed`")
    args = parser.parse_args()
    args.vllm_python = args.vllm_python.absolute()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    failures = (*PLATFORM_FAILURES, ServerDied, StreamFailed)
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
    if "failed" in record:
        return f"{record['name']:14s} failed: {record['failed']}"
    gap = ""
    if "largest_gap_s" in record:
        gap = f", largest gap {record['gap_at_switch_s']:.2f} s there, {record['largest_gap_s']:.2f} s in all"
    return (
        f"{record['name']:14s} first token {record['median_s']:6.2f} s, vLLM {record['ready_s']:6.2f} s{gap}"
    )


def _starts(args: argparse.Namespace) -> Iterator[Record]:
    params = {
        "part": "starts",
        "model": "tiny-coder",
        **chosen(args, "rounds", "threads"),
        "run": describe_run(MODULE),
    }
    alone, defaults, loader = list[StartTimes](), list[StartTimes](), list[StartTimes]()
    through = list[PlatformStart]()
    flags = ("--vllm-python", str(args.vllm_python), "--vllm-memory", "6GiB")
    with running_platform(None, *flags, nodes=1) as platform:
        platform.command("deploy", str(MODEL), "--name", "coder", "--engine", "vllm")
        by_vllm = stream_from_vllm(platform, "coder", PROMPT, TOKENS)
        source, infos = Path(platform.command("pull", "coder").strip()), ModelInfos()
        (node,) = source.parents[3].glob(".attach/*.sock")  # other platforms may run on the machine
        loader_settings = {"model": "coder", "socket": str(node)}
        start_once(args.vllm_python, source, PROMPT, infos)
        for _ in range(args.rounds):
            alone.append(start_once(args.vllm_python, source, PROMPT, infos))
            defaults.append(start_once(args.vllm_python, source, PROMPT, infos, defaults=True))
            loader.append(start_once(args.vllm_python, source, PROMPT, infos, loader=loader_settings))
            through.append(start_from_zero(platform, "coder", PROMPT, TOKENS))
    for name, times in (("vllm", alone), ("vllm-defaults", defaults), ("vllm-loader", loader)):
        first_s = [one.first_token_s for one in times]
        yield timed(name, params, first_s, ready_s=statistics.median(one.ready_s for one in times))
    yield timed(
        "native-first",
        {**params, "tokens": TOKENS},
        [one.first_token_s for one in through],
        ready_s=statistics.median(one.ready_s for one in through),
        stream_s=statistics.median(one.stream_s for one in through),
        streams=[len(one.streams) for one in through],
        largest_gap_s=max(one.largest_gap_s for one in through),
        gap_at_switch_s=max(one.gap_at_switch_s for one in through),
        same_tokens=all(stream == by_vllm for one in through for stream in one.streams),
    )


def _speed(args: argparse.Namespace) -> Iterator[Record]:
    with TemporaryDirectory(prefix="hc-stock-") as folder:
        for dtype in args.dtype:
            model = random_model(llama_125m(), dtype, "cpu", context=512)
            path = Path(folder) / dtype
            model.reference.save_pretrained(path)
            for batch in args.batch:
                given = {"dtype": dtype, "batch": batch, **chosen(args, "prompt", "tokens", "rounds")}
                for name in args.engines:
                    params = {"part": "speed", **given, "threads": args.threads, "run": describe_run(MODULE)}
                    try:
                        if name == "hypercast":
                            run = _native_rounds(args, model, batch)
                        else:
                            request = {"model": str(path), **given, "compiled": name == "vllm-compiled"}
                            run = _vllm_rounds(args.vllm_python, request, Path(folder))
                    except CompilerFailed as error:
                        yield {"name": name, "params": params, "failed": str(error)}
                        continue
                    rate = batch * args.tokens / statistics.median(run.seconds)
                    yield timed(name, params | {"threads": run.threads}, run.seconds, tokens_per_s=rate)


def _prompts(length: int, batch: int) -> list[list[int]]:
    """Return the prompts that speed_in_vllm.py makes, too."""
    return [[(7 * i + 31 * row + 3) % 31_000 for i in range(length)] for row in range(batch)]


def _native_rounds(args: argparse.Namespace, model: RandomModel, batch: int) -> SpeedRun:
    engine = make_engine(model, batch)
    rounds = []
    try:
        for _ in range(args.rounds + 1):
            began = time.perf_counter()
            run_engine(engine, _prompts(args.prompt, batch), args.tokens)
            rounds.append(time.perf_counter() - began)
    finally:
        engine.close()
    return SpeedRun(threads=torch.get_num_threads(), seconds=rounds[1:])


def _vllm_rounds(python: Path, request: Mapping[str, object], folder: Path) -> SpeedRun:
    """Run vLLM's rounds, with its caches in the folder. Raises ServerDied, CompilerFailed."""
    caches = {"VLLM_CACHE_ROOT": folder / "cache", "TORCHINDUCTOR_CACHE_DIR": folder / "inductor"}
    done = subprocess.run(
        [str(python), str(SPEED_IN_VLLM)],
        input=json.dumps(request),
        env=os.environ | {name: str(folder) for name, folder in caches.items()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        if any(name in done.stderr for name in ("InvalidCxxCompiler", "CppCompileError")):
            raise CompilerFailed("vLLM has no C++ compiler that works")
        raise ServerDied(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return SpeedRun(threads=found["threads"], seconds=found["seconds"])
