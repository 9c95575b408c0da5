"""The compared ways to provide instances, as the simulator models them (pure)."""

from dataclasses import dataclass
from enum import StrEnum

from benchmarks.scaleout.modes import GROUP_SETUP_S


class ImageSource(StrEnum):
    """Where a node without a copy of the image in its memory gets it."""

    CAST = "cast"  # from nodes that hold it
    DISK = "disk"  # from its own disk
    HOST = "host"  # every host has a copy
    FREE = "free"  # loading takes no time


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMode:
    """One way to provide instances.

    `planner` plans casts ("": the platform's choice by link rates), after `setup_s`. With `share` there is no
    scaling: that share of the nodes always runs instances. Without `keeps_copies` host memory has an image
    only while an instance runs there; where none runs, a node reads its own disk. With `frees_images` an
    accelerator frees the image of an instance that ends. With `moves` calls leave an instance that is to
    stop.
    """

    name: str
    description: str
    source: ImageSource = ImageSource.CAST
    planner: str = ""
    setup_s: float = 0.0
    share: float = 0.0
    keeps_copies: bool = True
    frees_images: bool = False
    moves: bool = False


MODES = {
    mode.name: mode
    for mode in (
        SimulatedMode(
            name="hypercast", description="casts by the planner that the platform chooses", moves=True
        ),
        SimulatedMode(
            name="serverlessllm",
            description="each node from its own disk, or host memory while it keeps a copy",
            source=ImageSource.DISK,
            frees_images=True,
        ),
        SimulatedMode(
            name="serverlessllm-allcache",
            description="every host has the model in memory",
            source=ImageSource.HOST,
            frees_images=True,
        ),
        SimulatedMode(
            name="faasnet",
            description="casts by a binary tree from running instances; without one, from the node's disk",
            planner="tree",
            keeps_copies=False,
            frees_images=True,
        ),
        SimulatedMode(
            name="faasnet-copies",
            moves=True,
            description="casts by a binary tree, from host memory too",
            planner="tree",
        ),
        SimulatedMode(
            name="nccl",
            description=f"group set-up of {GROUP_SETUP_S * 1e3:g} ms, then a ring from running instances; "
            "without one, from the node's disk",
            planner="chain",
            setup_s=GROUP_SETUP_S,
            keeps_copies=False,
            frees_images=True,
        ),
        SimulatedMode(
            name="nccl-copies",
            moves=True,
            description=f"group set-up of {GROUP_SETUP_S * 1e3:g} ms, then a ring, from host memory too",
            planner="chain",
            setup_s=GROUP_SETUP_S,
        ),
        SimulatedMode(
            name="blitzscale",
            description="casts by a chain, without ZigZag",
            planner="chain",
            frees_images=True,
        ),
        SimulatedMode(name="fixed-full", description="an instance on every node, no scaling", share=1.0),
        SimulatedMode(name="fixed-half", description="an instance on every second node", share=0.5),
        SimulatedMode(name="ideal", description="loading takes no time", source=ImageSource.FREE, moves=True),
    )
}
