"""The compared ways to scale out: each configures the same platform and scaling policy (pure)."""

from dataclasses import dataclass

from benchmarks.harness.rival_nodes import FREE_DEVICE
from benchmarks.scaleout.modes import GROUP_SETUP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMode:
    """One way to scale out.

    `planner` is that of all casts ("": the gateway chooses), before which nodes wait `setup_s`; `live` is the
    function's policy of serving while loading. With `own_disk` nodes have all models on their own disks, and
    without a planner load from there and from host memory only. `cached`: all hosts hold the model for the
    whole run. Without `keeps_copies` a host has a model in memory only while an instance runs there. With
    `served_copies` hosts also keep copies of what their accelerators serve, as in the original. `share`
    is the share of nodes that serve all the time, None where the policy decides. With `frees_images` an
    accelerator frees a model when its last instance ends, as in the originals. `serving` is the function's:
    disaggregated, some instances run prompts and others continue the calls. With `moves` the calls of an
    instance that is to stop continue on others; none of the originals does that.
    """

    name: str
    description: str
    planner: str = ""
    setup_s: float = 0.0
    live: str = "off"
    device: str = "h800"
    own_disk: bool = False
    cached: bool = False
    keeps_copies: bool = True
    served_copies: bool = False
    share: float | None = None
    frees_images: bool = False
    serving: str = "colocated"
    moves: bool = False

    def instances(self, nodes: int) -> int | None:
        """Return the fixed number of instances, None where the policy decides."""
        return None if self.share is None else max(1, round(self.share * nodes))

    @property
    def host_ttl_by(self) -> str:
        """What ends the copies in host memory."""
        if self.cached:
            return "nothing: all copies stay"
        if not self.keeps_copies:
            return "the gateway drops copies when their instances end"
        return "the gateway drops idle copies, but of each model one stays in the cluster"


MODES = {
    mode.name: mode
    for mode in (
        TraceMode(
            name="hypercast",
            moves=True,
            description="what a user gets by default: live mode auto, the planner chosen for each cast",
            live="auto",
        ),
        TraceMode(
            name="hypercast-pipeline",
            moves=True,
            description="the same, and loading nodes always serve in pipelines",
            live="pipeline",
        ),
        TraceMode(
            name="hypercast-disaggregated",
            moves=True,
            description="the default, and instances that run prompts hand calls off to others",
            live="auto",
            serving="disaggregated",
        ),
        TraceMode(
            name="hypercast-finish",
            description="the default, but calls of an instance that is to stop end there",
            live="auto",
        ),
        TraceMode(
            name="distserve",
            description="like DistServe: all nodes serve all the time, prompts on some and further tokens on "
            "others; how many of each follows the load, which the original's fixed pools do not",
            cached=True,
            served_copies=True,
            share=1.0,
            serving="disaggregated",
        ),
        TraceMode(
            name="stop-the-world",
            moves=True,
            description="the same casts, and nodes serve once they hold the whole model",
        ),
        TraceMode(
            name="serverlessllm",
            served_copies=True,
            description="like ServerlessLLM: each node loads from its own SSD at its full rate, or from host "
            "memory while the model is cached there (TTL as in all modes); nodes that have it are preferred",
            own_disk=True,
            frees_images=True,
        ),
        TraceMode(
            name="serverlessllm-allcache",
            served_copies=True,
            description="ServerlessLLM's AllCache: every host has every model in memory all the time, and "
            "each node loads from there",
            own_disk=True,
            cached=True,
            frees_images=True,
        ),
        TraceMode(
            name="faasnet",
            served_copies=True,
            description="like FaaSNet: binary tree from instances over the whole rate of links, from the "
            "node's own SSD where there is no instance; nodes serve once they hold the model whole",
            planner="tree",
            own_disk=True,
            keeps_copies=False,
            frees_images=True,
        ),
        TraceMode(
            name="faasnet-copies",
            moves=True,
            served_copies=True,
            description="binary tree from instances, from our copies in host memory and from images that "
            "stay on accelerators; nodes serve once they hold the model whole",
            planner="tree",
        ),
        TraceMode(
            name="nccl",
            served_copies=True,
            description=f"like NCCL: group set-up of {GROUP_SETUP_S * 1e3:g} ms, then a ring from instances, "
            "from the node's own SSD where there is none; nodes serve once they hold the model whole",
            planner="chain",
            setup_s=GROUP_SETUP_S,
            own_disk=True,
            keeps_copies=False,
            frees_images=True,
        ),
        TraceMode(
            name="nccl-copies",
            moves=True,
            served_copies=True,
            description="the same set-up and ring, from instances, from our copies in host memory and from "
            "images that stay on accelerators",
            planner="chain",
            setup_s=GROUP_SETUP_S,
        ),
        TraceMode(
            name="blitzscale",
            description="like BlitzScale: chain from nodes with the model, serving ones too, and ZigZag of "
            "overloaded and loading nodes; no set-up",
            planner="chain",
            live="zigzag",
            frees_images=True,
        ),
        TraceMode(
            name="fixed-full",
            description="all nodes serve all the time",
            cached=True,
            served_copies=True,
            share=1.0,
        ),
        TraceMode(
            name="fixed-half",
            description="half of the nodes serve all the time",
            cached=True,
            served_copies=True,
            share=0.5,
        ),
        TraceMode(
            name="ideal",
            moves=True,
            served_copies=True,
            description="every host has the model, and loading takes no time; the control plane is real",
            device=FREE_DEVICE,
            own_disk=True,
            cached=True,
        ),
    )
}
_FURTHER = (
    "hypercast-pipeline",
    "hypercast-disaggregated",
    "hypercast-finish",
    "distserve",
    "stop-the-world",
    "faasnet-copies",
    "nccl-copies",
)
COMPARED = tuple(name for name in MODES if name not in _FURTHER)  # by default
