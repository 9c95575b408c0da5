"""The health of versions that are being rolled out, and what follows from it. Pure."""

from dataclasses import dataclass
from math import sqrt

from gateway.cluster.state_cache import VersionKey
from gateway.core.contract import RolloutHealth
from registry.records.rollout import Rollout, RolloutState

MAX_FAILED_STARTS = 3  # of the candidate, one after the other, before it is given up
_Z = 1.96  # of the normal distribution: a rate is below its lower bound in 1 of 40 cases
_MIN_FIRST_TOKENS = 10  # by which a mean time to the first token is judged
_TTFT_SLACK_S = 0.05  # a difference that is never judged: it may be that of a scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAction:
    """Change the rollout with this id: to another state, or to another share if `percent` is set."""

    key: VersionKey
    id: str
    state: RolloutState
    percent: float | None = None
    reason: str = ""


def next_action(
    function: str, rollout: Rollout, health: RolloutHealth, wall_s: float
) -> RolloutAction | None:
    """Return the change that a rollout needs now (Unix time), None if it goes on as it is."""
    key = VersionKey(function, rollout.plan.candidate)
    reason = start_fault(health) or (fault(rollout, health) if rollout.state is RolloutState.RUNNING else "")
    if reason:
        return RolloutAction(key=key, id=rollout.id, state=RolloutState.ROLLED_BACK, reason=reason)
    if rollout.state is RolloutState.STARTING:
        ready = RolloutAction(key=key, id=rollout.id, state=RolloutState.RUNNING)
        return ready if health.ready else None
    at_s = step_ends_at(rollout)
    if at_s is None or wall_s < at_s or health.candidate.ended < rollout.plan.limits.min_requests:
        return None
    percent = rollout.next_percent
    if percent is not None:
        return RolloutAction(key=key, id=rollout.id, state=RolloutState.RUNNING, percent=percent)
    return RolloutAction(
        key=key, id=rollout.id, state=RolloutState.PROMOTED, reason="all steps were passed in good health"
    )


def step_ends_at(rollout: Rollout) -> float | None:
    """Return when a rollout's share may grow by itself (Unix time), None if it never does."""
    steps = rollout.plan.steps
    if rollout.state is not RolloutState.RUNNING or not steps:
        return None
    if rollout.next_percent is None and steps[-1] < 100:
        return None
    return rollout.since + rollout.plan.step_s


def start_fault(health: RolloutHealth) -> str:
    """Return why the candidate cannot serve, "" if it can or may still."""
    if health.ready or health.failed_starts < MAX_FAILED_STARTS:
        return ""
    return f"{health.failed_starts} starts in a row failed: {health.start_error}"


def fault(rollout: Rollout, health: RolloutHealth) -> str:
    """Return why the candidate is worse than the stable version by more than the limits, "" if it is not.

    Rates of few requests vary: the lower bound of the candidate's (Wilson's, at 97.5 %) has to be above the
    limit, so the fewer requests there are, the more of them have to fail.
    """
    limits, candidate, stable = rollout.plan.limits, health.candidate, health.stable
    if candidate.ended >= limits.min_requests:
        of_stable = stable.errors / stable.ended if stable.ended else 0.0
        if lower_bound(candidate.errors, candidate.ended) > of_stable + limits.max_error_rate:
            return (
                f"{candidate.errors} of {candidate.ended} requests failed in {limits.window_s:g} s, "
                f"of the stable version {stable.errors} of {stable.ended}"
            )
    least = max(limits.min_requests, _MIN_FIRST_TOKENS)
    if candidate.first_tokens >= least and stable.first_tokens >= least:
        took_s = candidate.first_token_s / candidate.first_tokens
        stable_s = stable.first_token_s / stable.first_tokens
        if took_s > stable_s * limits.max_ttft_ratio + _TTFT_SLACK_S:
            return (
                f"the mean time to the first token of {candidate.first_tokens} requests in "
                f"{limits.window_s:g} s is {took_s:.3f} s, of the stable version {stable_s:.3f} s"
            )
    return ""


def lower_bound(errors: int, requests: int) -> float:
    """Return the lower bound of Wilson's interval for a rate (Wilson 1927, section "probable inference")."""
    if not errors:
        return 0.0
    rate, z2 = errors / requests, _Z * _Z
    middle = rate + z2 / (2 * requests)
    spread = _Z * sqrt(rate * (1 - rate) / requests + z2 / (4 * requests * requests))
    return max(0.0, (middle - spread) / (1 + z2 / requests))
