"""What is equal for all modes of a run, from the options (pure)."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import ROOT
from benchmarks.harness.records import chosen
from benchmarks.harness.traces import TraceRequest, read_trace, trim_to_context
from benchmarks.scaleout.profiles import network_bytes_per_s
from benchmarks.scaleout.scenarios import emulated_device, emulated_model
from benchmarks.trace.arrivals import burstiness, part_of, sample, shares, spread
from benchmarks.trace.measures import ModelScale, Slo
from benchmarks.trace.modes import TraceMode
from benchmarks.trace.synthetic import SYNTHETIC
from cli.upload.bundle import Bundle, bundle_model
from invoker.emulated.device_clock import Lateness
from invoker.emulated.profiles import Profile
from registry.config.emulation import EmulatedDevice
from registry.records.function import ScaleDown

TRACES = {
    "azure-conv": ROOT / "benchmarks/data/azure-llm-2023-conv.csv.gz",
    "azure-code": ROOT / "benchmarks/data/azure-llm-2023-code.csv.gz",
}
HOLDERS = ("gpu", "host", "mixed")
SCALE_DOWN_HELP = "seconds for which a surplus is kept (default as long as a start would take)"
_FOREVER_S = 86_400.0
_ROOM_MODELS, _ROOM_BYTES = 3, 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioning:
    """The instances and copies that functions begin with and keep.

    `holders` says where the models are at first: `gpu`, each on an accelerator and serving; `host`, each in
    one node's host memory; `mixed`, each serving and in host memory besides. Functions keep `min_instances`,
    the first one at least one, unless models begin in host memory. Host memory has room for `host_models`.
    """

    holders: str = "gpu"
    min_instances: int = 1
    host_models: int | None = None

    def least(self, place: int) -> int:
        """Return how many instances a function always has."""
        serving_first = place == 0 and self.holders != "host"
        return max(1, self.min_instances) if serving_first else self.min_instances

    def copies(self, place: int) -> int:
        """Return how many hosts have its model in memory at first, besides those where instances bring it."""
        if self.holders == "mixed":
            return 2
        return 0 if self.least(place) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceScenario:
    """What is equal for all modes; all times are model time.

    Each function has its own model, all of one size. `policy` is the scaling policy with its settings,
    `scale_down_s` how long a surplus of instances lasts (None: as long as a further start would take) and
    `keep_alive_s` the last one, `host_ttl_s` how long an idle copy stays in host memory. Windows of runs end
    `tail_s` after the last arrival: requests that are not answered by then are, but the GPU time that they
    take later does not count.
    """

    device: EmulatedDevice
    profile: Profile
    lateness: Lateness
    bundles: Sequence[Bundle]
    nodes: int
    arrivals: Sequence[TraceRequest]
    policy: str
    target_concurrency: int
    slo: Slo
    scale_down_s: float | None
    keep_alive_s: float
    host_ttl_s: float
    tail_s: float
    provisioning: Provisioning

    @property
    def slower(self) -> int:
        return self.device.slower

    @property
    def model_scale(self) -> ModelScale:
        rate = network_bytes_per_s(self.profile) / self.slower
        return ModelScale(slower=self.slower, scale=self.device.scale, link_bytes_s=rate)

    @property
    def functions(self) -> list[str]:
        return [f"model-{place}" for place in range(len(self.bundles))]

    @property
    def image_bytes(self) -> int:
        return self.bundles[0].image_bytes

    @property
    def window_s(self) -> float:
        return self.arrivals[-1].offset_s + self.tail_s

    @property
    def disk_bytes_s(self) -> float:
        """A disk's rate, so that a start from it takes as long as from one that is read in many small pieces.

        The images are so small that the copy of the last piece to the accelerator would be added.
        """
        links = self.profile.links
        return 1 / (1 / links.disk - 1 / links.host) / self.device.scale / self.slower

    @property
    def arena_bytes(self) -> int:
        """An accelerator's memory.

        An instance takes half of what is free for its KV cache, and leaves the rest to other functions. Where
        there are none, the memory is larger, so that the only function has all that is free.
        """
        usable = 0.9 * self.profile.gpus * self.profile.gpu.memory_bytes / self.device.scale
        if len(self.bundles) > 1:
            return int(usable)
        return int(self.image_bytes + 2 * (usable - self.image_bytes))

    @property
    def slots(self) -> int:
        """How many instances fit on an accelerator: each leaves half of what its model leaves free."""
        count, free = 0, float(self.arena_bytes)
        while free >= self.image_bytes:
            count, free = count + 1, (free - self.image_bytes) / 2
        return count

    def host_bytes(self, mode: TraceMode) -> int:
        """Return a node's host memory; where all models are cached it has room for all."""
        models, spare = _ROOM_MODELS, _ROOM_BYTES
        if self.provisioning.host_models is not None:
            models, spare = self.provisioning.host_models, self.image_bytes // 2
        if mode.cached:
            models = max(models, len(self.bundles))
        return models * self.image_bytes + spare

    def host_models(self, mode: TraceMode) -> int:
        """Return how many models a node's host memory holds."""
        return self.host_bytes(mode) // self.image_bytes

    def fixed(self, mode: TraceMode, place: int) -> int | None:
        """Return a function's fixed instances by its share of requests, None where the policy decides."""
        instances = mode.instances(self.nodes)
        return None if instances is None else max(1, round(instances * shares(len(self.bundles))[place]))

    def excess(self, mode: TraceMode) -> str:
        """Return why the mode's fixed instances do not fit on the nodes, or ""."""
        fixed = sum(self.fixed(mode, place) or 0 for place in range(len(self.bundles)))
        room = self.nodes * self.slots
        if fixed <= room:
            return ""
        return f"{mode.name} has {fixed} instances of {len(self.bundles)} functions, but nodes hold {room}"

    def copies(self, mode: TraceMode, place: int) -> int:
        """Return how many hosts have a function's model in memory when a run begins."""
        if mode.cached:
            return self.nodes
        return self.provisioning.copies(place) if mode.keeps_copies else 0

    def at_first(self, mode: TraceMode, place: int) -> int:
        """Return how many instances of a function a run begins with."""
        return self.fixed(mode, place) or self.provisioning.least(place)

    def scaling(self, mode: TraceMode, place: int = 0) -> dict[str, Any]:
        """Return a function's scaling settings, in time of the machine."""
        fixed, slower = self.fixed(mode, place), self.slower
        settings: dict[str, Any] = {
            "min_instances": fixed or self.provisioning.least(place),
            "max_instances": fixed or self.nodes,
            "keep_alive_s": self.keep_alive_s * slower,
            "host_keep_alive_s": self._host_ttl_s(mode) * slower,
            "host_copies": int(mode.keeps_copies),
            "live": mode.live,
            "ttft_target_s": self.slo.ttft_s * slower,
        }
        if mode.serving != "colocated":
            settings["serving"] = mode.serving
        if self.policy == "concurrency":
            return {**settings, "target_concurrency": self.target_concurrency}
        return {
            **settings,
            "policy": self.policy,
            "tbt_target_s": self.slo.tbt_s * slower,
            **scale_down_settings(self.scale_down_s, slower),
        }

    def _host_ttl_s(self, mode: TraceMode) -> float:
        if mode.cached:
            return _FOREVER_S
        return self.host_ttl_s if mode.keeps_copies else 0.0


def scale_down_settings(delay_s: float | None, slower: int = 1) -> dict[str, Any]:
    """Return the settings of scaling for --scale-down-delay; None means the platform's default."""
    if delay_s is None:
        return {"scale_down": ScaleDown.START}
    return {"scale_down": ScaleDown.DELAY, "scale_down_delay_s": delay_s * slower}


def scenario_of(args: argparse.Namespace) -> tuple[TraceScenario, dict[str, Any]]:
    """Return the scenario, and facts about its part of the trace. Raises ValueError, OSError."""
    trace = trace_of(args)
    from_s, part = part_of(trace, args.half, args.start, 60 * args.minutes)
    part = sample(part, args.sample, args.seed)
    timed = [TraceRequest(one.offset_s / args.speedup, one.prompt_tokens, one.output_tokens) for one in part]
    trimmed = trim_to_context(spread(timed, args.functions, args.seed), args.profile.model.context)
    facts = {
        "from_s": round(from_s, 3),
        "burstiness": round(burstiness([one.offset_s for one in part], 60 * args.minutes), 4),
        "requests": len(part),
        "prompts_capped": trimmed.prompts_capped,
        "outputs_capped": trimmed.outputs_capped,
    }
    scenario = TraceScenario(
        device=emulated_device(args),
        profile=args.profile,
        lateness=Lateness(step_s=args.late_ms / 1e3, hop_s=args.hop_late_ms / 1e3),
        bundles=[
            bundle_model(emulated_model(args, variant), "auto", "", None) for variant in range(args.functions)
        ],
        nodes=args.nodes,
        arrivals=trimmed.arrivals,
        policy=args.policy,
        target_concurrency=args.target_concurrency,
        slo=Slo(ttft_s=args.ttft_target, tbt_s=args.tbt_target),
        scale_down_s=args.scale_down_delay,
        keep_alive_s=args.keep_alive,
        host_ttl_s=args.host_ttl,
        tail_s=args.tail,
        provisioning=Provisioning(
            holders=args.holders, min_instances=args.min_instances, host_models=args.host_models
        ),
    )
    return scenario, facts


def trace_of(args: argparse.Namespace) -> list[TraceRequest]:
    """Return the whole trace. Raises InvalidTrace, OSError."""
    if args.trace in SYNTHETIC:
        return SYNTHETIC[args.trace](args.seed)
    return read_trace(TRACES.get(args.trace, Path(args.trace)))


def params_of(args: argparse.Namespace, scenario: TraceScenario, mode: TraceMode) -> dict[str, Any]:
    """Return the parameters of a mode's record."""
    links = asdict(args.profile.links)
    names = ("trace", "half", "start", "minutes", "sample", "speedup", "nodes", "slower", "functions")
    scaling = ("policy", "target_concurrency", "scale_down_delay", "keep_alive", "host_ttl", "tail")
    scale = scenario.device.scale
    return {
        "emulated": str(args.profile),
        "model": scenario.bundles[0].architecture,
        "image_bytes": scenario.image_bytes * scale,
        **chosen(args, *names, "seed", "repeat", *scaling, "holders", "min_instances"),
        "host_ttl_by": mode.host_ttl_by,
        "idle_images": "freed" if mode.frees_images else "stay on the accelerator until their room is needed",
        "host_models": scenario.host_models(mode),
        "arena_bytes": scenario.arena_bytes * scale,
        "fixed_instances": [scenario.fixed(mode, place) for place in range(args.functions)],
        "slo": asdict(scenario.slo),
        "late_s": asdict(scenario.lateness),
        "ssd_bytes_s": links["disk"],
        "host_to_gpu_bytes_s": links["host"],
        "link_bytes_s": links["network"],
        "says": mode.description,
        **{name: getattr(mode, name) for name in ("planner", "setup_s", "live", "share", "serving", "moves")},
    }
