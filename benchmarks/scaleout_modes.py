"""The ways of scaling out that are compared: each is the same platform, told to move models so (pure)."""

from dataclasses import dataclass

GROUP_SETUP_S = 0.3  # what NCCL takes to make a group of ranks, by the papers


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """`planner` is what the gateway is told (NAME or NAME/BLOCKS; "": it chooses). A cast's targets wait
    `setup_s` before its first byte. With `own_copies` there is no cast: each node loads what it has itself,
    nodes that hold the model from host memory, others at the rate of their `target_device`. `live` is the
    function's policy of serving while the model arrives."""

    name: str
    says: str
    planner: str = ""
    setup_s: float = 0.0
    own_copies: bool = False
    target_device: str = "h800"
    live: str = "off"


MODES = {
    mode.name: mode
    for mode in (
        Mode(
            name="hypercast",
            says="pipelines of loading nodes; the planner is chosen for each cast",
            live="pipeline",
        ),
        Mode(name="stop-the-world", says="binomial pipeline; who has all of it serves", planner="binomial"),
        Mode(name="faasnet", says="binary tree", planner="tree"),
        Mode(
            name="nccl",
            says=f"group set-up of {GROUP_SETUP_S * 1e3:g} ms, then a finely sliced ring",
            planner="chain/512",
            setup_s=GROUP_SETUP_S,
        ),
        Mode(
            name="serverlessllm-ssd",
            says="each node from its own disk, holders from host memory",
            own_copies=True,
            target_device="h800-disk",
        ),
        Mode(name="serverlessllm-memory", says="each node from its own host memory", own_copies=True),
        # Without ZigZag until the platform serves so: then with live="zigzag".
        Mode(name="blitzscale", says="chain, without ZigZag", planner="chain"),
    )
}
