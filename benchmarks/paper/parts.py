"""The parts of the papers' experiments: each is one run of a benchmark, at most 15 minutes on two cores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

MODES = (
    "hypercast",
    "hypercast-pipeline",
    "serverlessllm",
    "serverlessllm-allcache",
    "faasnet",
    "nccl",
    "blitzscale",
    "fixed-full",
    "fixed-half",
    "ideal",
)
SOME = ("hypercast", "hypercast-pipeline", "serverlessllm", "faasnet", "ideal")
REPEATS = 3
# A turn of these four takes an hour.
FROM_ZERO_REPEATS = 2
BURST = "--half second --start burst --minutes 5 --speedup 5 --slower 1"
# A cast of a 1000th of 13B to 8 nodes takes all of two processors, and 0.9 s instead of 0.55 s: at a 4000th
# they are mostly idle, and starts take what the model says.
SCALE = 4000
# Of the conversation trace, which has 16 times as many output tokens a second, two cores emulate a half: the
# whole kept them 73 to 79 % busy.
SNIPPET = f"{BURST} --emulated h800-llama2-13b/{SCALE}"
# Scaling to zero: the papers' 12 models, of which a host holds three, and instances that end half a second
# after their last call. At twice its speed the trace leaves pauses between the calls of a function; of the
# conversation trace two cores emulate 40 %.
FROM_ZERO = (
    f"--emulated h800-llama2-13b/{SCALE} --half second --start burst --minutes 5 --speedup 2 --slower 1 "
    "--functions 12 --min-instances 0 --holders host --host-models 3 --keep-alive 0.5 --scale-down-delay 0.5 "
    "--tail 6"
)
FROM_ZERO_MODES = ("hypercast", "serverlessllm", "faasnet", "nccl", "ideal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One run of a benchmark.

    Parts of one `source` are repeats, from which claims take medians. `expects` names records without which
    the run is not complete. `after` is a part of which it reads the file.
    """

    name: str
    source: str
    module: str
    arguments: Sequence[str]
    minutes: float
    shows: str
    testbed: bool = False
    expects: Sequence[str] = ()
    after: str = ""

    @property
    def file(self) -> str:
        return f"paper-{self.name}.json"


def _part(name: str, module: str, arguments: str, minutes: float, shows: str) -> Part:
    words, module = arguments.split(), f"benchmarks.{module}"
    return Part(name=name, source=name, module=module, arguments=words, minutes=minutes, shows=shows)


def _trace(source: str, options: str, modes: Sequence[str], minutes: float, shows: str) -> Part:
    part = _part(source, "trace", f"{options} --modes {','.join(modes)}", minutes, shows)
    return replace(part, testbed=True, expects=modes)


def _repeats(scenarios: Sequence[Part], count: int) -> list[Part]:
    """Return the scenarios in turns."""
    return [
        replace(part, name=f"{part.name}-{number}") for number in range(1, count + 1) for part in scenarios
    ]


def _traces() -> list[Part]:
    """Return the trace runs that are reported: two traces, two sizes, repeated in turns."""
    scenarios = [
        _trace(
            f"trace-{trace}-{nodes}-nodes",
            f"--trace azure-{trace}{kept} {SNIPPET} --nodes {nodes}",
            MODES,
            14 if nodes == 8 else 15,
            f"GPU time, SLO and latencies on the {words} trace, {nodes} nodes",
        )
        for trace, words, kept in (("conv", "conversation", " --sample 0.5"), ("code", "code", ""))
        for nodes in (8, 12)
    ]
    from_zero = [
        _trace(
            f"trace-zero-{trace}-{nodes}-nodes",
            f"--trace azure-{trace}{kept} {FROM_ZERO} --nodes {nodes}",
            FROM_ZERO_MODES,
            15,
            f"12 functions that scale to zero and back, {words} trace, {nodes} nodes",
        )
        for trace, words, kept in (("code", "code", ""), ("conv", "conversation", " --sample 0.4"))
        for nodes in (12, 8)
    ]
    return [*_repeats(scenarios, REPEATS), *_repeats(from_zero, FROM_ZERO_REPEATS)]


def _more_traces() -> list[Part]:
    conv = f"--trace azure-conv --half second --start burst --nodes 8 --emulated h800-llama2-13b/{SCALE}"
    late = f"--trace azure-conv {SNIPPET} --nodes 8 --late-ms 0 --hop-late-ms 0"
    few = ("hypercast", "hypercast-pipeline", "faasnet", "ideal")
    half_speed = BURST.replace("--slower 1", "--slower 2")
    return [
        _trace(
            "trace-ablation",
            f"--trace azure-conv {SNIPPET} --nodes 8 --policy concurrency",
            ("serverlessllm", "faasnet", "stop-the-world", "hypercast-pipeline"),
            6,
            "network, multicast, live serving and policy one after the other",
        ),
        *(
            _trace(
                f"trace-roles-{trace}",
                f"--trace azure-{trace}{kept} {SNIPPET} --nodes 8",
                ("hypercast", "hypercast-disaggregated", "distserve", "fixed-full"),
                7,
                f"prompts and further tokens on different nodes, {words} trace",
            )
            for trace, words, kept in (("conv", "conversation", " --sample 0.4"), ("code", "code", ""))
        ),
        _trace(
            "trace-burstgpt",
            f"--trace synthetic-burstgpt {SNIPPET} --nodes 8",
            MODES,
            14,
            "the same on arrivals fitted to figures of BurstGPT",
        ),
        _trace(
            "trace-zero-copies",
            f"--trace azure-code {FROM_ZERO} --nodes 12",
            ("hypercast", "hypercast-pipeline", "serverlessllm-allcache", "faasnet-copies", "nccl-copies"),
            15,
            "12 functions from zero: casts of others from our host copies, all models on all hosts",
        ),
        _trace(
            "trace-7b",
            f"--trace azure-conv {BURST} --nodes 8 --emulated h800-llama2-7b/{SCALE}",
            SOME,
            7,
            "the conversation trace with Llama-2 7B",
        ),
        _trace(
            "trace-70b",
            f"--trace azure-conv {BURST} --nodes 8 --emulated h800-llama2-70b/{SCALE}",
            SOME,
            8,
            "the conversation trace with Llama-2 70B",
        ),
        _trace(
            "trace-70b-slower-2",
            f"--trace azure-conv {half_speed} --nodes 8 --emulated h800-llama2-70b/{SCALE}",
            ("hypercast", "serverlessllm", "faasnet", "ideal"),
            13,
            "the same at half the real speed",
        ),
        _trace(
            "trace-scale-down",
            f"--trace azure-conv {SNIPPET} --nodes 8 --scale-down-delay 0.5",
            ("hypercast", "faasnet", "ideal"),
            5,
            "a surplus of instances ends after 500 ms",
        ),
        _trace(
            "trace-moves",
            f"--trace azure-conv {SNIPPET} --nodes 8",
            ("hypercast", "hypercast-finish", "nccl", "ideal"),
            6,
            "calls of instances that are to stop move to others, or end there",
        ),
        _trace(
            "trace-delay",
            f"--trace azure-code {SNIPPET} --nodes 12 --scale-down-delay 2",
            ("hypercast", "serverlessllm", "faasnet", "nccl", "ideal"),
            8,
            "a surplus of instances is kept for 2 s in all modes",
        ),
        _trace(
            "trace-copies",
            f"--trace azure-code {SNIPPET} --nodes 12",
            ("hypercast", "stop-the-world", "faasnet-copies", "nccl-copies"),
            6,
            "casts of others, with our copies, images that stay on accelerators, and moves of calls",
        ),
        _trace(
            "trace-steady",
            f"--trace synthetic-steady --minutes 11 --nodes 8 --emulated h800-llama2-13b/{SCALE}",
            ("hypercast",),
            13,
            "a constant rate for eleven minutes of real time, at which numbers of instances must not flap",
        ),
        _trace("trace-late-0", late, SOME, 7, "an emulator that forgives no late step or hop"),
        _trace(
            "trace-scale-1000",
            f"--trace azure-code {BURST} --nodes 12 --emulated h800-llama2-13b/1000",
            SOME,
            8,
            "the code trace with four times the bytes to move, for the same modelled times",
        ),
        _trace(
            "trace-slower-2", f"{conv} --minutes 2.5 --speedup 5 --slower 2", SOME, 9, "half the real speed"
        ),
        _trace(
            "trace-slower-5",
            f"{conv} --minutes 2.5 --speedup 5 --slower 5",
            few,
            15,
            "a fifth of the real speed",
        ),
        _trace(
            "trace-slower-20",
            f"{conv} --minutes 1 --speedup 5 --slower 20 --tail 3",
            ("hypercast-pipeline", "faasnet"),
            12,
            "a twentieth of the real speed",
        ),
    ]


def _scaleouts() -> list[Part]:
    modes = "hypercast,stop-the-world,faasnet,nccl,blitzscale,serverlessllm-mixed"

    def burst(name: str, options: str, minutes: float, shows: str, names: str = modes) -> Part:
        part = _part(name, "scaleout", f"--slower 20 {options} --modes {names}", minutes, shows)
        return replace(part, testbed=True, expects=names.split(","))

    order = "turned,half-turned,unturned"
    return [
        *(
            burst(f"scaleout-13b-k{k}", f"--sources {k}", 11, f"a burst of 50, 13B, {k} of 8 nodes hold it")
            for k in (1, 2, 4)
        ),
        burst("scaleout-13b-k1-12-nodes", "--nodes 12", 12, "the same, 1 of 12 nodes"),
        burst(
            "scaleout-13b-serving",
            "--sources 2 --holders gpu",
            8,
            "the same, 2 nodes serve when the burst comes",
            "hypercast,stop-the-world,faasnet,blitzscale",
        ),
        burst(
            "scaleout-13b-mixed",
            "--sources 2 --holders mixed",
            5,
            "the same, one serves and one has it in host memory",
            "hypercast,stop-the-world,faasnet",
        ),
        burst(
            "scaleout-13b-warm",
            "--sources 8",
            4,
            "the same, all nodes have it in host memory",
            "hypercast,serverlessllm-memory",
        ),
        burst("scaleout-13b-order", "--sources 4 --holders gpu", 5, "the order of blocks, k = 4", order),
        burst("scaleout-7b-k1", "--emulated h800-llama2-7b/1000", 9, "a burst of 50, 7B, 1 of 8 nodes"),
        burst("scaleout-7b-k4", "--emulated h800-llama2-7b/1000 --sources 4", 9, "the same, 4 of 8 nodes"),
        burst(
            "scaleout-70b-k1",
            "--emulated h800-llama2-70b/1000 --nodes 4",
            14,
            "a burst of 50, 70B on one emulated device, 1 of 4 nodes",
            "hypercast,faasnet,nccl",
        ),
    ]


def _small() -> list[Part]:
    sizes = "--models 7B,13B,70B --nodes 4,8,12"
    planners = "--planner automatic,binomial,chain,tree --blocks 16,64 --conditions even,jitter"
    day = "--hours 24 --nodes 1000 --functions 200 --rate 5 --min-instances 0 --keep-alive 60 --host-ttl 3600"
    against = "--against benchmarks/results/paper-trace-{}-{}-nodes-1.json"
    return [
        _part(
            "sim-multicast", "multicast_sim", f"{sizes} {planners}", 1, "casts of 7B, 13B and 70B, simulated"
        ),
        _part("sim-day", "trace_sim", day, 4, "a day at 1,000 nodes, simulated"),
        *(
            replace(
                _part(
                    f"sim-against-{trace}-{nodes}",
                    "trace_sim",
                    against.format(trace, nodes),
                    1,
                    f"the simulation beside the run with {nodes} nodes, {words} trace",
                ),
                after=f"trace-{trace}-{nodes}-nodes-1",
            )
            for trace, words in (("conv", "conversation"), ("code", "code"))
            for nodes in (8, 12)
        ),
        replace(
            _part(
                "multicast",
                "multicast",
                "--nodes 4,8,12 --rate 400mbit --planner auto,chain,tree,binomial --blocks 64 --repeat 3",
                12,
                "casts of 128 MiB over shaped links, beside gloo and Open MPI",
            ),
            testbed=True,
        ),
        _part("ablation", "ablation", "", 2, "pre-allocation, packing and the number of blocks"),
        _part("starts", "starts", "", 5, "starts from every tier"),
        _part("policy-scale", "policy_scale", "", 3, "decisions for 200 functions on 1,000 nodes"),
        _part("live-picture", "live_picture", "", 2, "one load that serves meanwhile"),
        _part(
            "zigzag-prompts",
            "zigzag",
            "--rounds 24 --output-tokens 1",
            8,
            "an overloaded node that runs prompts, helped by a loading one",
        ),
        _part("zigzag", "zigzag", "--rounds 12", 6, "the same with outputs of 4 tokens"),
        _part("zigzag-4s", "zigzag", "--load 4 --rounds 2", 4, "the same over a load of 4 s"),
        replace(
            _part("interference", "interference", "--casts 4", 6, "casts from nodes that serve"),
            testbed=True,
        ),
    ]


PARTS: Mapping[str, Part] = {
    part.name: part for part in (*_small(), *_traces(), *_more_traces(), *_scaleouts())
}
