"""A rollout: a share of a function's requests goes to another version until that is current or given up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from registry.errors import InvalidRecord

MAX_STEPS = 32
MAX_REASON = 500
_PLACES = 1 << 64


class RolloutState(StrEnum):
    """The life cycle of a rollout; only one that is active sends requests to its candidate."""

    STARTING = "starting"  # no instance of the candidate is ready yet: all requests go to the stable version
    RUNNING = "running"  # its share of the requests goes to the candidate
    PROMOTED = "promoted"  # final: the candidate is the current version
    ABORTED = "aborted"  # final: given up by an operator
    ROLLED_BACK = "rolled_back"  # final: given up by the platform, for the reason in the record


TRANSITIONS: Mapping[RolloutState, frozenset[RolloutState]] = {
    RolloutState.STARTING: frozenset({RolloutState.RUNNING, RolloutState.ABORTED, RolloutState.ROLLED_BACK}),
    RolloutState.RUNNING: frozenset({RolloutState.PROMOTED, RolloutState.ABORTED, RolloutState.ROLLED_BACK}),
    RolloutState.PROMOTED: frozenset(),
    RolloutState.ABORTED: frozenset(),
    RolloutState.ROLLED_BACK: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """What the candidate may be worse by than the stable version, over the last `window_s`.

    `max_error_rate` is added to the stable version's rate of errors, `max_ttft_ratio` multiplies its mean
    time to the first token. Nothing is judged by fewer than `min_requests` of the candidate.
    """

    max_error_rate: float = 0.05
    max_ttft_ratio: float = 2.0
    min_requests: int = 5
    window_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.max_error_rate <= 1:
            raise InvalidRecord(f"max_error_rate must be 0 to 1, not {self.max_error_rate}")
        if not 1 <= self.max_ttft_ratio <= 1000:
            raise InvalidRecord(f"max_ttft_ratio must be 1 to 1000, not {self.max_ttft_ratio}")
        if not 1 <= self.min_requests <= 1_000_000:
            raise InvalidRecord(f"min_requests must be 1 to 1000000, not {self.min_requests}")
        if not 5 <= self.window_s <= 3600:
            raise InvalidRecord(f"window must be 5 s to 1 h, not {self.window_s} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """What an operator asks for.

    `percent` of the requests go to version `candidate`, and copies of `shadow_percent` of the others. With
    `steps` the share becomes the next greater of them after `step_s` in good health; after the last the
    candidate is promoted if that was 100.
    """

    candidate: int
    percent: float
    shadow_percent: float = 0.0
    steps: tuple[float, ...] = ()
    step_s: float = 300.0
    limits: RolloutLimits = field(default_factory=RolloutLimits)

    def __post_init__(self) -> None:
        for name, value in (("percent", self.percent), ("shadow_percent", self.shadow_percent)):
            if not 0 <= value <= 100:
                raise InvalidRecord(f"{name} must be 0 to 100, not {value:g}")
        if len(self.steps) > MAX_STEPS:
            raise InvalidRecord(f"a rollout has at most {MAX_STEPS} steps, not {len(self.steps)}")
        if any(not 0 < step <= 100 for step in self.steps) or list(self.steps) != sorted(set(self.steps)):
            raise InvalidRecord("steps must be rising percentages above 0, at most 100")
        if not 1 <= self.step_s <= 7 * 86400:
            raise InvalidRecord(f"the time of a step must be 1 s to 7 days, not {self.step_s:g} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The last rollout of a function, kept in its head. Times are Unix seconds.

    `stable` was current when it began. `since` is when the state or the share last changed, and `reason` why
    it ended.
    """

    id: str
    stable: int
    plan: RolloutPlan
    started_at: float
    since: float
    state: RolloutState = RolloutState.STARTING
    reason: str = ""

    @property
    def is_active(self) -> bool:
        return bool(TRANSITIONS[self.state])

    @property
    def splits(self) -> bool:
        """Whether requests or copies of them go to the candidate."""
        return self.state is RolloutState.RUNNING and bool(self.plan.percent or self.plan.shadow_percent)

    @property
    def next_percent(self) -> float | None:
        """The share of the next step, None after the last."""
        return next((step for step in self.plan.steps if step > self.plan.percent), None)


def goes_to_candidate(rollout: Rollout, request_id: str) -> bool:
    """Return whether a request goes to the candidate: the same for one id, also at any greater share."""
    return _place(f"split {rollout.id} {request_id}") < rollout.plan.percent


def is_shadowed(rollout: Rollout, request_id: str) -> bool:
    """Return whether a request to the stable version is copied to the candidate."""
    return _place(f"shadow {rollout.id} {request_id}") < rollout.plan.shadow_percent


def _place(text: str) -> float:
    """Return a number in `[0, 100)`, as good as random, which the text determines."""
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") * 100 / _PLACES
