"""Measure vLLM through Hypercast beside vLLM alone (`starts`, `cast`) and beside the native engine (`speed`).

`starts`, of tiny-coder on this machine's processors, in turns beside an idle platform: `vllm` is vLLM's
server on a folder with the flags and the environment of a node's servers; `vllm-defaults` the same with
vLLM's own (but for --dtype, --enforce-eager and the size of its KV cache on a CPU); `vllm-loader` is `vllm`
with the weights from a node's memory (`--load-format hypercast`); `vllm-preloaded` is `vllm` forked from a
process that has imported it, as on a node; `native-first` a function with engine: vllm that is scaled to
zero, whose requests the native engine answers until vLLM is ready. `ready_s` is until vLLM serves, `median_s`
until the first token arrives.

The client of `native-first` streams all the time, as vLLM's start takes longer than the model's context
lasts: one stream after the other, until one has ended after vLLM became ready (`stream_s`; `streams` counts
them). `largest_gap_s` is between two tokens of one stream, `gap_at_switch_s` within 2 s of `ready_s`,
`same_tokens` whether all streams have the tokens of one that vLLM makes alone.

`cast`, of a random float32 Llama, with stock servers that take the weights from their node's memory
(`--load-format hypercast`), each node on a virtual host of its own, with a link of --link-rate. In turns:
`one-start` is one server, `start` is --engines-in-cast servers at once, on nodes that have the model;
`transfer` is the cast to these nodes alone, by the cast's record; `during-cast` is all servers started
together with that cast. `seconds` are until the last server serves (of `transfer`, until the cast ends).
`ratio` is `during-cast` divided by the sum of `start` and `transfer`, `over_start_s` what it takes longer
than `start`. `load_s` is how long the slowest server waited for weights and read them: the rest of the cast
is hidden by vLLM's own start, most of which is imports. `casts` are those that ran during `during-cast`, and
`same_tokens` is whether each server answered as one on the model's own file does. The records with
`-preloaded` are the same for servers forked from one process that has imported vLLM.

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.engine.command import make_engine, run_engine
from benchmarks.harness.arguments import at_least, benchmark_parser, comma_list, rate, some_of
from benchmarks.harness.event_stream import StreamFailed
from benchmarks.harness.local_platform import PLATFORM_FAILURES, PlatformStateError, running_platform
from benchmarks.harness.processes import ROOT
from benchmarks.harness.random_model import RandomModel, llama_125m, random_model
from benchmarks.harness.records import Record, chosen, describe_run, recording, timed
from benchmarks.scaleout.memory import free_memory
from benchmarks.stock_engines.cast_start import CastCluster, CastRound, load_s, run_round, shortfall
from benchmarks.stock_engines.platform_start import PlatformStart, start_from_zero, stream_from_vllm
from benchmarks.stock_engines.vllm_server import (
    ServerDied,
    ServerStart,
    StartTimes,
    preloaded_vllm,
    start_together,
)
from invoker.device import usable_cores
from invoker.vllm.errors import ServerFailed
from invoker.vllm.model_infos import ModelInfos

MODULE = "benchmarks.stock_engines"
MODEL = ROOT / "functions" / "tiny-coder"
PARTS = ("starts", "cast", "speed")
ENGINES = ("vllm", "vllm-compiled", "hypercast")
PROMPT = (5, 6, 7, 8)
TOKENS = 1000  # of a stream: nearly the whole context of the model
CAST_BYTES = 620_000_000  # at most, of the model of `cast`
CAST_TOKENS = 16
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
    engines = "of `cast`, each on a node of its own"
    parser.add_argument("--engines-in-cast", type=at_least(1), default=4, metavar="N", help=engines)
    parser.add_argument("--link-rate", type=rate, default="400mbit", help="of each node in `cast`")
    parser.add_argument("--engines", type=some_of(ENGINES), default=list(ENGINES), help="of `speed`")
    parser.add_argument("--batch", type=comma_list(int), default=[1, 8])
    parser.add_argument("--dtype", type=some_of(("float32", "bfloat16")), default=["float32", "bfloat16"])
    parser.add_argument("--prompt", type=at_least(1), default=64, help="prompt tokens of `speed`")
    parser.add_argument("--tokens", type=at_least(2), default=64, help="output tokens of `speed`")
    args = parser.parse_args()
    args.vllm_python = args.vllm_python.absolute()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    failures = (*PLATFORM_FAILURES, ServerDied, ServerFailed, StreamFailed)
    with recording("stock_engines", json=args.json, show=_line, failures=failures) as kept:
        if "cast" in args.parts and (missing := shortfall(args.engines_in_cast, CAST_BYTES, *free_memory())):
            raise PlatformStateError(missing)
        if "starts" in args.parts:
            kept.add(*_starts(args))
        if "cast" in args.parts:
            kept.add(*_cast(args))
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
    if params["part"] == "cast":
        over = f", {record['ratio']:.2f} of start + transfer" if "ratio" in record else ""
        return f"{record['name']:21s} {record['median_s']:6.2f} s{over}"
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
    times: dict[str, list[StartTimes]] = {}
    through = list[PlatformStart]()
    flags = ("--vllm-python", str(args.vllm_python), "--vllm-memory", "6GiB")
    with (
        running_platform(None, *flags, nodes=1) as platform,
        TemporaryDirectory(prefix="hc-stock-") as folder,
        preloaded_vllm(args.vllm_python, Path(folder) / "preloaded") as preloaded,
    ):
        platform.command("deploy", str(MODEL), "--name", "coder", "--engine", "vllm")
        by_vllm = stream_from_vllm(platform, "coder", PROMPT, TOKENS)
        source, infos = Path(platform.command("pull", "coder").strip()), ModelInfos()
        (node,) = source.parents[3].glob(".attach/*.sock")  # other platforms may run on the machine
        start = ServerStart(python=args.vllm_python, folder=source, prompt=PROMPT)
        loader = replace(start, loader={"model": "coder", "socket": str(node)})
        start_together([start], infos)
        for _ in range(args.rounds):
            for name, started in (
                ("vllm", start_together([start], infos)),
                ("vllm-defaults", start_together([replace(start, defaults=True)], infos)),
                ("vllm-loader", start_together([loader], infos)),
                ("vllm-preloaded", preloaded.start_together([start], infos)),
            ):
                times.setdefault(name, []).extend(started)
            through.append(start_from_zero(platform, "coder", PROMPT, TOKENS))
    for name, found in times.items():
        first_s = [one.first_token_s for one in found]
        yield timed(name, params, first_s, ready_s=statistics.median(one.ready_s for one in found))
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


def _cast(args: argparse.Namespace) -> Iterator[Record]:
    infos, stock, forked = ModelInfos(), list[CastRound](), list[CastRound]()
    with TemporaryDirectory(prefix="hc-stock-") as folder:
        model = Path(folder) / "model"
        random_model(llama_125m(), "float32", "cpu", context=512).reference.save_pretrained(model)
        start = ServerStart(
            python=args.vllm_python,
            folder=model,
            prompt=PROMPT,
            tokens=CAST_TOKENS,
            arguments=("--skip-tokenizer-init",),
        )
        (by_file,) = start_together([start], infos)
        memory = ("--gpu-memory", "64MiB", "--host-memory", "1GiB")
        flags = ("--device", "cpu", "--link-rate", f"{8 * args.link_rate}bit", *memory)
        with (
            running_platform(None, *flags, nodes=args.engines_in_cast + 1) as platform,
            preloaded_vllm(args.vllm_python, Path(folder) / "preloaded") as preloaded,
        ):
            platform.command("deploy", str(model), "--name", "llama")
            cluster = CastCluster.find(platform, "llama")
            for _ in range(args.rounds):
                stock.append(run_round(cluster, start, infos, start_together))
                forked.append(run_round(cluster, start, infos, preloaded.start_together))
    params = {
        "part": "cast",
        "model": "llama_125m float32",
        "link_bytes_s": args.link_rate,
        **chosen(args, "rounds", "threads", "engines_in_cast"),
        "run": describe_run(MODULE),
    }
    for suffix, rounds in (("", stock), ("-preloaded", forked)):
        yield timed(f"one-start{suffix}", params, [one.one.ready_s for one in rounds])
        loads_s = [load_s(one.start) for one in rounds]
        yield timed(f"start{suffix}", params, [one.start_s for one in rounds], load_s=loads_s)
        yield timed(f"transfer{suffix}", params, [one.transfer.seconds for one in rounds])
        yield timed(
            f"during-cast{suffix}",
            params,
            [one.during_cast_s for one in rounds],
            ratio=statistics.median(one.ratio for one in rounds),
            ratios=[one.ratio for one in rounds],
            over_start_s=[one.over_start_s for one in rounds],
            load_s=[load_s(one.during_cast) for one in rounds],
            casts=[[asdict(cast) for cast in one.casts] for one in rounds],
            same_tokens=all(one.has_tokens(by_file.ids) for one in rounds),
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
