"""The compared ways to scale out: each configures the same platform (pure)."""

from dataclasses import dataclass

GROUP_SETUP_S = 0.3  # NCCL's group set-up, from the papers


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to scale out.

    `planner` is passed to the gateway (NAME or NAME/BLOCKS; "" lets it choose). Nodes without the model wait
    `setup_s` before its first byte. With `own_copies` there is no cast: each node loads its own copy at its
    device's rate, holders in host memory with `source_device`, others with `target_device`; with `gloo` these
    first wait for the duration of gloo's broadcast. `live` is the function's policy of serving while loading.
    """

    name: str
    description: str
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
            description="pipelines of loading nodes; the planner is chosen for each cast",
            live="pipeline",
        ),
        Mode(
            name="stop-the-world",
            description="binomial pipeline; nodes serve once they hold the whole model",
            planner="binomial",
        ),
        Mode(name="faasnet", description="binary tree", planner="tree"),
        Mode(
            name="nccl",
            description=f"group set-up of {GROUP_SETUP_S * 1e3:g} ms, then a ring",
            planner="chain",
            setup_s=GROUP_SETUP_S,
        ),
        Mode(
            name="gloo",
            description="gloo's broadcast, measured over the same links beforehand; its set-up and the copy "
            "to the accelerator are not counted",
            own_copies=True,
            gloo=True,
        ),
        Mode(
            name="serverlessllm-ssd",
            description="each node from its own disk",
            own_copies=True,
            source_device="h800-disk",
            target_device="h800-disk",
        ),
        Mode(name="serverlessllm-memory", description="each node from its own host memory", own_copies=True),
        Mode(
            name="blitzscale",
            description="chain, and ZigZag of source and target",
            planner="chain",
            live="zigzag",
        ),
        Mode(
            name="serverlessllm-mixed",
            description="holders from host memory, others from their own disks",
            own_copies=True,
            target_device="h800-disk",
        ),
        # The effect of block order: each sub-group starts with its own part, each two share one, or none.
        Mode(name="turned", description="binomial, k-way reordering on", planner="binomial", live="pipeline"),
        Mode(
            name="half-turned",
            description="binomial, k-way reordering by halves",
            planner="binomial-half-turned",
            live="pipeline",
        ),
        Mode(
            name="unturned",
            description="binomial, k-way reordering off",
            planner="binomial-unturned",
            live="pipeline",
        ),
    )
}
TURNS = ("turned", "half-turned", "unturned")
COMPARED = tuple(name for name in MODES if name not in (*TURNS, "serverlessllm-mixed"))  # default
EMULATED_ONLY = ("serverlessllm-ssd", "serverlessllm-mixed")  # a CPU has no rate to configure
