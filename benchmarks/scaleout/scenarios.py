"""What is asked of scaleout on its command line, as scenes."""

import argparse
import json
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.random_llama import write_random_llama
from benchmarks.scaleout_client import Burst
from benchmarks.scaleout_cluster import FUNCTION, Scene
from cli.bundle import Bundle, bundle_model
from registry.emulation import EmulatedDevice, EmulatedModel

TOKENIZER = ROOT / "functions" / "tiny-coder" / "model"
TIMEOUT_S = 600.0


def scenes(args: argparse.Namespace, folder: Path) -> list[Scene]:
    """One for each kind and number of holders; a checkpoint that is needed is written to `folder`."""
    device: EmulatedDevice | None = None
    if args.real:
        write_random_llama(folder / "checkpoint", TOKENIZER, args.real)
        vocabulary = int(json.loads((folder / "checkpoint" / "config.json").read_text())["vocab_size"])
        bundle, emulated = bundle_model(str(folder / "checkpoint"), "auto", "float32", None), ""
    else:
        name, _, model = args.emulated.partition("/")[0].partition("-")
        scale, vocabulary = args.profile.scale, args.profile.model.vocabulary
        emulated = str(EmulatedModel(name=model, scale=scale))
        device = EmulatedDevice(name=name, count=args.profile.gpus, scale=scale, slower=args.slower)
        bundle = bundle_model(emulated, "auto", "", None)
    burst = Burst(
        model=FUNCTION,
        emulated=emulated,
        vocabulary=vocabulary,
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        timeout_s=TIMEOUT_S,
    )
    return [
        Scene(device=device, bundle=bundle, nodes=args.nodes, sources=sources, holders=holders, burst=burst)
        for holders in args.holders
        for sources in args.sources
        if somebody_starts(args.nodes, sources, holders)
    ]


def somebody_starts(nodes: int, sources: int, holders: str) -> bool:
    """Whether there is a node that does not serve yet; from host memory all nodes may start."""
    if holders == "mixed":
        return 2 <= sources <= nodes
    return sources < nodes or (sources == nodes and holders == "host")


def link_bytes_s(args: argparse.Namespace) -> float:
    """Of the model's time."""
    return float(args.rate) if args.real else float(args.profile.network_bytes_per_s)


def transfer_s(args: argparse.Namespace, bundle: Bundle) -> float:
    """A whole copy over one link, in the model's time."""
    return bundle.image_bytes / link_bytes_s(args)
