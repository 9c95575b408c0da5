"""Compare the engine's tokens per second with transformers' `generate`: equal weights, prompts and lengths.

Makes a random Llama of 124 million parameters (float32 on a CPU, bfloat16 on a GPU), and in turns both
generate greedily. A batch of one is `alone`. A larger one is `batched` for both, and for transformers also
`sequential`: one call after the other. Rates are of the whole call with prompts; `ttft_s` is the median over
the sequences of the time from the call to the first token. In float32 the tokens must be equal. `limit_s` is
the time to read all weights once per decode step, at the best rate at which this run read the same bytes (in
a sum, and in a matrix-vector product).

`pipeline` is the same engine in `--stages` stages within this process, with one step in flight, so that its
excess over `hypercast` is the cost of stages: `stage_ms` per step and stage. Transfers between nodes are not
included, nor, on a GPU, the graphs of whole engines.

`processes`, on a CPU, is such a pipeline of as many processes, connected by sockets like nodes (--links):
`hop_ms` is the part of a step in which no stage computes, per hop; a step makes one hop per stage.

example:
  python -m benchmarks.engine --device cpu --batch 1,8 --json engine.json
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from transformers import LlamaConfig, StoppingCriteria, StoppingCriteriaList

from benchmarks.engine.local_pipeline import LocalPipeline
from benchmarks.engine.stages import ProcessPipeline, processes_of
from benchmarks.harness.arguments import at_least, benchmark_parser, comma_list
from benchmarks.harness.random_model import RandomModel, llama_125m, random_model
from benchmarks.harness.records import chosen, describe_run, recording, timed
from invoker.engine.contract import GenerateEngine, NewSequence
from invoker.engine.cuda_graphs import GraphCapture
from invoker.engine.decoder import DecoderEngine, limits_for
from invoker.engine.paths import LayerPath
from invoker.engine.scheduling.pipeline_scheduler import PipelineScheduler, PipelineShape
from registry.messages.sampling import Sampling

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One round: its duration, the tokens by sequence, and when each sequence's first token arrived."""

    seconds: float
    first_s: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class EngineContender:
    """A contender: how it generates for a batch, and its rounds."""

    name: str
    mode: str
    batch: int
    generate: Callable[[Prompts], Generated]
    stages: int = 0
    used_s: Callable[[], float] = float  # compute seconds so far, where known
    rounds: list[Generated] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)  # per round


def make_engine(
    model: RandomModel,
    sequences: int,
    path: LayerPath = LayerPath.AUTO,
    capture: GraphCapture | Literal["auto", "off"] = "auto",
    prefill_budget: int = 512,
) -> DecoderEngine:
    """Build an engine on the model's image, with room for `sequences` full contexts."""
    return DecoderEngine(
        model.spec,
        model.region,
        model.kv_bytes(sequences),
        max_sequences=sequences,
        prefill_budget=prefill_budget,
        path=path,
        capture=capture,
    )


def make_pipeline(
    model: RandomModel, sequences: int, count: int, path: LayerPath = LayerPath.AUTO
) -> LocalPipeline:
    """Build a pipeline of `count` stages, as equal as possible, on the model's image."""
    spec = model.spec
    layers = spec.manifest.num_layers
    cuts = [layers * i // count for i in range(count + 1)]
    stages = [model.stage(part, sequences, path) for part in pairwise(cuts)]
    shape = PipelineShape(
        stages=count,
        pages=min(stage.pages for stage in stages),
        context=spec.context_length,
        vocabulary=stages[0].geometry.vocabulary,
        steps=1,
    )
    limits = limits_for(model.reference.device.type, sequences=sequences)
    return LocalPipeline(stages, PipelineScheduler(shape, limits))


def run_engine(engine: GenerateEngine, prompts: Prompts, length: int) -> Generated:
    """Generate for all prompts at once."""
    started_s = time.perf_counter()
    for sequence in _sequences(prompts, length):
        engine.add(sequence)
    tokens: list[list[int]] = [[] for _ in prompts]
    first_s = [0.0] * len(prompts)
    while engine.has_work:
        outputs = engine.step()
        now_s = time.perf_counter() - started_s
        for output in outputs:
            assert not output.error, output.error
            if output.token_id is not None:
                index = int(output.request_id)
                first_s[index] = first_s[index] or now_s
                tokens[index].append(output.token_id)
    return Generated(
        seconds=time.perf_counter() - started_s, first_s=tuple(first_s), tokens=tuple(map(tuple, tokens))
    )


def run_processes(pipeline: ProcessPipeline, prompts: Prompts, length: int) -> Generated:
    """Generate for all prompts at once on stages in processes."""
    started_s = time.perf_counter()
    arrived = pipeline.generate(_sequences(prompts, length))
    return Generated(
        seconds=time.perf_counter() - started_s,
        first_s=tuple(tokens[0][0] for tokens in arrived),
        tokens=tuple(tuple(token for _, token in tokens) for tokens in arrived),
    )


def _sequences(prompts: Prompts, length: int) -> list[NewSequence]:
    sampling = Sampling(max_tokens=length, temperature=0.0, ignore_eos=True)
    return [
        NewSequence(
            request_id=str(index), prompt_ids=prompt, generated_ids=(), sampling=sampling, tenant=str(index)
        )
        for index, prompt in enumerate(prompts)
    ]


_ROW_BYTES = 4096


class _FirstTokenCriteria(StoppingCriteria):
    """A stopping criterion that records when the first token was made and never stops."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.first_s = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if not self.first_s:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.first_s = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=self._device)


def run_transformers(model: RandomModel, prompts: Prompts, length: int) -> Generated:
    """Generate for all prompts, which have equal length, in one call of `generate`."""
    device = model.reference.device
    started_s = time.perf_counter()
    ids = torch.tensor(prompts, device=device)
    watch = _FirstTokenCriteria(device)
    found = model.reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=length,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([watch]),
    )
    tokens = found[:, ids.shape[1] :].tolist()
    return Generated(
        seconds=time.perf_counter() - started_s,
        first_s=(watch.first_s - started_s,) * len(prompts),
        tokens=tuple(map(tuple, tokens)),
    )


def run_sequentially(model: RandomModel, prompts: Prompts, length: int) -> Generated:
    """Generate with one call of `generate` per prompt; a first token counts from its own call."""
    parts = [run_transformers(model, [prompt], length) for prompt in prompts]
    return Generated(
        seconds=sum(part.seconds for part in parts),
        first_s=tuple(part.first_s[0] for part in parts),
        tokens=tuple(part.tokens[0] for part in parts),
    )


def read_seconds(model: RandomModel) -> float:
    """Return the shortest of several sums over the image and of products of its rows and a vector."""
    memory = model.region.bytes
    wide = memory[: memory.numel() // _ROW_BYTES * _ROW_BYTES]
    integers, numbers = (
        wide.view(torch.int64),
        wide.view(model.reference.dtype).view(len(wide) // _ROW_BYTES, -1),
    )
    vector = torch.ones(numbers.shape[1], dtype=numbers.dtype, device=numbers.device)

    def summed() -> None:
        int(integers.sum())

    def multiplied() -> None:
        float(torch.mv(numbers, vector)[0])

    took_s = []
    for read in (summed, multiplied) * 3:
        started_s = time.perf_counter()
        read()
        took_s.append(time.perf_counter() - started_s)
    return min(took_s)


def contenders(
    model: RandomModel,
    engine: DecoderEngine,
    pipelines: Mapping[int, LocalPipeline],
    processes: Mapping[int, ProcessPipeline],
    batches: Sequence[int],
    length: int,
) -> list[EngineContender]:
    """Return the contenders for each batch size; pipelines are keyed by their number of stages."""
    found = []
    for batch in batches:
        mode = "alone" if batch == 1 else "batched"
        theirs = partial(run_transformers, model, length=length)
        found += [
            EngineContender("hypercast", mode, batch, partial(run_engine, engine, length=length)),
            EngineContender("transformers", mode, batch, theirs),
        ]
        if batch > 1:
            one_by_one = partial(run_sequentially, model, length=length)
            found.append(EngineContender("transformers", "sequential", batch, one_by_one))
        for stages, pipeline in pipelines.items():
            generate = partial(run_engine, pipeline, length=length)
            found.append(EngineContender("pipeline", mode, batch, generate, stages))
        for stages, apart in processes.items():
            generate = partial(run_processes, apart, length=length)
            found.append(EngineContender("processes", mode, batch, generate, stages, apart.used_s))
    return found


def measure(model: RandomModel, runners: Sequence[EngineContender], prompts: Prompts, rounds: int) -> float:
    """Run all in turns, the first turn uncounted; return the fastest read of the weights."""
    reads = []
    for number in range(-1, rounds):
        reads.append(read_seconds(model))
        for runner in runners:
            before_s = runner.used_s()
            generated = runner.generate(prompts[: runner.batch])
            if number >= 0:
                runner.rounds.append(generated)
                runner.computed_s.append(runner.used_s() - before_s)
    return min(reads)


def record(runner: EngineContender, length: int, read_s: float, common: dict[str, object]) -> dict[str, Any]:
    seconds = [one.seconds for one in runner.rounds]
    steps = length * (runner.batch if runner.mode == "sequential" else 1)
    stages = {"stages": runner.stages} if runner.stages else {}
    hops: dict[str, float] = {}
    if runner.name == "processes":
        outside = [all_s - s for all_s, s in zip(seconds, runner.computed_s, strict=True)]
        hops["hop_ms"] = statistics.median(outside) * 1e3 / (length * runner.stages)
    params = {"batch": runner.batch, "mode": runner.mode, **stages, **common}
    return timed(
        runner.name,
        params,
        seconds,
        steps * read_s,
        tokens_per_s=runner.batch * length / statistics.median(seconds),
        ttft_s=statistics.median(first for one in runner.rounds for first in one.first_s),
        **hops,
    )


def add_stage_costs(rows: Sequence[dict[str, Any]], length: int) -> None:
    """Add to each pipeline's record what a step costs more per stage than in the whole engine."""
    whole = {row["params"]["batch"]: row["median_s"] for row in rows if row["name"] == "hypercast"}
    for row in rows:
        stages = row["params"].get("stages")
        if stages and row["name"] == "pipeline":
            more_s = row["median_s"] - whole[row["params"]["batch"]]
            row["stage_ms"] = more_s * 1e3 / (length * stages)


def equal_tokens(runners: Sequence[EngineContender]) -> bool:
    """Return whether all contenders of a batch size generated equal tokens in each round."""
    found: dict[int, set[tuple[tuple[int, ...], ...]]] = {}
    for runner in runners:
        found.setdefault(runner.batch, set()).update(one.tokens for one in runner.rounds)
    return all(len(tokens) == 1 for tokens in found.values())


def run(args: argparse.Namespace, config: LlamaConfig) -> list[dict[str, Any]]:
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    model = random_model(config, dtype, args.device, context=args.prompt + args.tokens)
    generator = torch.Generator().manual_seed(1)
    shape = (max(args.batch), args.prompt)
    prompts = torch.randint(3, model.reference.config.vocab_size, shape, generator=generator).tolist()
    engine = make_engine(model, max(args.batch), args.path, args.graphs)
    pipelines = {
        count: make_pipeline(model, max(args.batch), count, args.path)
        for count in args.stages
        if count <= model.spec.manifest.num_layers
    }
    with ExitStack() as stack:
        processes = start_processes(stack, model, args, tuple(pipelines))
        runners = contenders(model, engine, pipelines, processes, args.batch, args.tokens)
        with torch.inference_mode():
            read_s = measure(model, runners, prompts, args.rounds)
    common = {
        **params_of(args, dtype, model, read_s),
        "tokens_equal": equal_tokens(runners),
        "torch": torch.__version__,
        **describe_run("benchmarks.engine"),
    }
    rows = [record(runner, args.tokens, read_s, common) for runner in runners]
    add_stage_costs(rows, args.tokens)
    return rows


def start_processes(
    stack: ExitStack, model: RandomModel, args: argparse.Namespace, counts: Sequence[int]
) -> dict[int, ProcessPipeline]:
    """Start a pipeline of processes for each of these stage counts, on a CPU."""
    if args.device != "cpu" or args.links == "off":
        return {}
    path, threads, local = args.path, torch.get_num_threads(), args.links == "unix"
    return {
        count: stack.enter_context(processes_of(model, max(args.batch), count, path, threads, local=local))
        for count in counts
        if count > 1
    }


def params_of(args: argparse.Namespace, dtype: str, model: RandomModel, read_s: float) -> dict[str, object]:
    """Return the parameters that all records share."""
    nbytes = model.spec.manifest.nbytes
    return {
        **chosen(args, "device", "rounds", "path", "graphs", "links"),
        "dtype": dtype,
        "prompt_tokens": args.prompt,
        "output_tokens": args.tokens,
        "threads": torch.get_num_threads(),
        "weight_bytes": nbytes,
        "read_gb_per_s": nbytes / read_s / 1e9,
    }


def show(row: dict[str, Any]) -> str:
    """Format a record as one line."""
    params = row["params"]
    name = f"{params['stages']} stages" if "stages" in params else row["name"]
    if "hop_ms" in row:
        name = f"{params['stages']} processes"
    hop = f"  a hop {row['hop_ms']:.3f} ms" if "hop_ms" in row else ""
    return (
        f"{name:12} batch {params['batch']:2} {params['mode']:10} {row['tokens_per_s']:8.1f} tokens/s"
        f"  first token {row['ttft_s'] * 1e3:7.1f} ms  {row['ratio_to_limit']:5.2f} x the limit{hop}"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser("benchmarks.engine", __doc__)
    add = parser.add_argument
    add("--device", default="cpu", help="cpu or cuda")
    add("--batch", type=comma_list(at_least(1)), default="1,8", help="batch sizes")
    add("--stages", type=comma_list(at_least(1)), default="2,4", help="stages of pipelines")
    add("--links", choices=["unix", "tcp", "off"], default="unix", help="links between stages in processes")
    add("--prompt", type=int, default=32, help="prompt tokens")
    add("--tokens", type=int, default=64, help="tokens to generate")
    add("--rounds", type=at_least(1), default=5, help="rounds")
    add("--threads", type=int, default=0, help="torch's threads, for all (default: torch's default)")
    add("--dtype", default="", help="float32 or bfloat16 (default: float32 on a CPU, bfloat16 on a GPU)")
    add("--path", type=LayerPath, choices=tuple(LayerPath), default="auto", help="implementation of layers")
    add("--graphs", choices=["auto", "off"], default="auto", help="CUDA graphs, on a GPU")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    with recording("engine", json=args.json, show=show) as out:
        out.add(*run(args, llama_125m()))
    params = out.records[0]["params"]
    if params["dtype"] == "float32" and not params["tokens_equal"]:
        sys.exit("engine: the contenders' tokens differ in float32")


if __name__ == "__main__":
    main()
