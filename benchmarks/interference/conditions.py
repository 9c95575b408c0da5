"""The compared conditions, and the scenarios of serving to which they apply (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from registry.records.function import ServingMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What runs beside the streams: a cast from the node that serves them, or none.

    With `bands` the links serve urgent packets first and bulk ones last, else all in one queue. `holders` are
    the roles of the nodes that hold the image.
    """

    name: str
    description: str
    casts: bool = True
    bands: bool = True
    holders: tuple[str, ...] = ("sender",)


ONE_QUEUE = Condition(
    name="one-queue",
    description="casts from the node that serves; links have one queue, so that marks mean nothing",
    bands=False,
)
LIMITED = Condition(
    name="limited",
    description="casts from the node that serves; links have bands, so that weights take what serving leaves",
)
AVOIDED = Condition(
    name="avoided",
    description="the decode node holds the image too: the planner chooses it instead of the prefill node",
    holders=("sender", "receiver"),
)
ELSEWHERE = Condition(
    name="elsewhere",
    description="a node that serves nothing is the source: what one machine for all nodes costs",
    holders=("other",),
)
ALONE = Condition(name="alone", description="no cast", casts=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingScenario:
    """Streams of one kind: `concurrent` are in flight all the time, each of some prompt and output tokens.

    Without `emulated` a small model computes on the processor. A disaggregated function has an instance for
    prompts, which hands K and V to one that decodes.
    """

    name: str
    description: str
    emulated: bool
    concurrent: int
    prompt_tokens: int
    output_tokens: int
    serving: ServingMode = ServingMode.COLOCATED
    conditions: Sequence[Condition] = (ONE_QUEUE, LIMITED, ELSEWHERE, ALONE)

    @property
    def is_disaggregated(self) -> bool:
        return self.serving is ServingMode.DISAGGREGATED


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        ServingScenario(
            name="streams-13b",
            description="one instance of the emulated model serves all streams",
            emulated=True,
            concurrent=6,
            prompt_tokens=512,
            output_tokens=64,
        ),
        ServingScenario(
            name="handoff-13b",
            description="one emulated instance runs prompts, and hands K and V to one that decodes",
            emulated=True,
            concurrent=4,
            prompt_tokens=512,
            output_tokens=48,  # so that more than 1 % of the tokens are second ones, which wait for K and V
            serving=ServingMode.DISAGGREGATED,
            conditions=(ONE_QUEUE, LIMITED, AVOIDED, ALONE),
        ),
        ServingScenario(
            name="streams-native",
            description="a small model that the native engine computes on the processor",
            emulated=False,
            concurrent=2,
            prompt_tokens=64,
            output_tokens=32,
        ),
    )
}
