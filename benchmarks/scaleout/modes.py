"""The ways of scaling out that are compared: each is the same platform, told to move models so (pure)."""

from dataclasses import dataclass

GROUP_SETUP_S = 0.3  # what NCCL takes to make a group of ranks, by the papers


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """`planner` is what the gateway is told (NAME or NAME/BLOCKS; "": it chooses). Nodes that do not hold the
    model wait `setup_s` before its first byte. With `own_copies` there is no cast: each node loads what it
    has itself, at the rate of its device: holders in host memory of their `source_device`, others of their
    `target_device`; with `gloo` these wait until gloo has broadcast it. `live` is the function's policy of
    serving while the model arrives."""

    name: str
    says: str
    planner: str = ""
    setup_s: float = 0.0
    own_copies: bool = False
    source_device: str = "h800"
    target_device: str = "h800"
    gloo: bool = False
    live: str = "off"


MODES = {
    mode.name: mode
    for mode in (
        Mode(
            name="hypercast",
            says="pipelines of loading nodes; the planner is chosen for each cast",
            live="pipeline",
        ),
        Mode(
            name="stop-the-world",
            says="binomial pipeline; who has all of it serves",
            planner="binomial",
        ),
        Mode(name="faasnet", says="binary tree", planner="tree"),
        Mode(
            name="nccl",
            says=f"group set-up of {GROUP_SETUP_S * 1e3:g} ms, then a ring",
            planner="chain",
            setup_s=GROUP_SETUP_S,
        ),
        Mode(
            name="gloo",
            says="gloo's broadcast, run over the same links beforehand; its own set-up and the copy to the "
            "accelerator behind it count for nothing",
            own_copies=True,
            gloo=True,
        ),
        Mode(
            name="serverlessllm-ssd",
            says="each node from its own disk",
            own_copies=True,
            source_device="h800-disk",
            target_device="h800-disk",
        ),
        Mode(name="serverlessllm-memory", says="each node from its own host memory", own_copies=True),
        Mode(
            name="blitzscale", says="chain, and ZigZag of source and target", planner="chain", live="zigzag"
        ),
        Mode(
            name="serverlessllm-mixed",
            says="holders from host memory, others from their own disks",
            own_copies=True,
            target_device="h800-disk",
        ),
        # What the order of blocks is worth: each sub-group begins with a part of its own, each two, or none.
        Mode(
            name="turned",
            says="binomial, k-way reordering on",
            planner="binomial",
            live="pipeline",
        ),
        Mode(
            name="half-turned",
            says="binomial, k-way reordering by halves",
            planner="binomial-half-turned",
            live="pipeline",
        ),
        Mode(
            name="unturned",
            says="binomial, k-way reordering off",
            planner="binomial-unturned",
            live="pipeline",
        ),
    )
}
TURNS = ("turned", "half-turned", "unturned")
COMPARED = tuple(name for name in MODES if name not in (*TURNS, "serverlessllm-mixed"))  # by default
EMULATED_ONLY = ("serverlessllm-ssd", "serverlessllm-mixed")  # the processor has no rate that could be set
