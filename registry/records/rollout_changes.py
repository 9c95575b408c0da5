"""Begin, change and end of a rollout as pure decisions on a function's head.

Both states apply them by compare-and-set on the head that was read, so that a controller which has lost its
lease changes nothing: a step names the rollout and what it was decided for.
"""

from collections.abc import Callable
from dataclasses import replace

from registry.errors import Conflict, NotFound
from registry.records.function import Function
from registry.records.rollout import MAX_REASON, TRANSITIONS, Rollout, RolloutPlan, RolloutState

RolloutStep = Callable[[Function], Function]
"""Returns a function's head with its rollout changed; raises to refuse."""


def begin_rollout(head: Function, plan: RolloutPlan, *, id_: str, at: float) -> Function:
    """Begin a rollout, or change the share, steps and limits of the active one of the same version.

    Raises NotFound, and Conflict: the version is current, or another one is being rolled out.
    """
    if plan.candidate not in head.versions:
        raise NotFound(f"function {head.name} has no version {plan.candidate}")
    known = head.active_rollout
    if known is not None:
        if known.plan.candidate != plan.candidate:
            raise in_progress(head)
        return replace(head, rollout=replace(known, plan=plan, since=at))
    if plan.candidate == head.current:
        raise Conflict(f"version {plan.candidate} of {head.name} is the current one already")
    rollout = Rollout(id=id_, stable=head.current, plan=plan, started_at=at, since=at)
    return replace(head, rollout=rollout)


def run_rollout(head: Function, id_: str, *, at: float) -> Function:
    """Let the candidate's share of the requests go there: it has an instance."""
    known = _active(head, id_)
    if known.state is RolloutState.RUNNING:
        return head
    return replace(head, rollout=_moved(head, known, RolloutState.RUNNING, "", at))


def advance_rollout(head: Function, id_: str, percent: float, *, at: float) -> Function:
    """Set the share of a running rollout to that of its next step; unchanged where that was done already."""
    known = _active(head, id_)
    if known.state is not RolloutState.RUNNING or known.next_percent != percent:
        return head
    return replace(head, rollout=replace(known, plan=replace(known.plan, percent=percent), since=at))


def end_rollout(head: Function, id_: str, state: RolloutState, reason: str, *, at: float) -> Function:
    """End the active rollout; `promoted` makes its candidate current. Unchanged where it has ended so.

    Raises Conflict: it has ended otherwise, or cannot end so now.
    """
    if head.rollout is not None and (head.rollout.id, head.rollout.state) == (id_, state):
        return head
    known = _active(head, id_)
    rollout = _moved(head, known, state, reason, at)
    current = known.plan.candidate if state is RolloutState.PROMOTED else head.current
    return replace(head, rollout=rollout, current=current)


def in_progress(head: Function) -> Conflict:
    """Return the error of a change that would disturb the active rollout."""
    rollout = head.active_rollout
    number = 0 if rollout is None else rollout.plan.candidate
    return Conflict(f"version {number} of {head.name} is being rolled out: promote or abort it first")


def _active(head: Function, id_: str) -> Rollout:
    known = head.active_rollout
    if known is None or known.id != id_:
        raise Conflict(f"{head.name} has no rollout in progress")
    return known


def _moved(head: Function, rollout: Rollout, state: RolloutState, reason: str, at: float) -> Rollout:
    if state not in TRANSITIONS[rollout.state]:
        number = rollout.plan.candidate
        raise Conflict(
            f"the rollout of version {number} of {head.name} is {rollout.state}: it cannot be {state} now"
        )
    return replace(rollout, state=state, reason=reason[:MAX_REASON], since=at)
