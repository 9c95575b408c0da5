"""Deploy, rollback and scaling of a function as pure decisions.

Both states apply what these return by compare-and-set on the head that was read.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from registry.errors import Conflict, NotFound
from registry.records.function import OPEN_ACCESS, Access, Function, FunctionVersion, Scaling, check_name
from registry.records.rollout import RolloutState
from registry.records.rollout_changes import end_rollout, in_progress

AccessStep = Callable[[Access | None], Access]
"""Returns the access to store for a function's present one, None for a new function; raises to refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFunction:
    """The stored state of a function; `last` is the highest version number ever assigned to its name.

    Numbers are not reused, even after a deletion: an instance of the deleted function may still be draining,
    and `name:2` must stay unambiguous.
    """

    head: Function | None = None
    current: FunctionVersion | None = None
    last: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedVersion:
    """A planned head and the version that the draft is (new if `is_new`)."""

    head: Function
    result: FunctionVersion
    is_new: bool


def keep_access(known: Access | None) -> Access:
    """Leave the access as it is; a new function is the operator's, open to all."""
    return known or OPEN_ACCESS


def plan_version(
    known: KnownFunction,
    draft: FunctionVersion,
    scaling: Scaling | None,
    access: AccessStep = keep_access,
    *,
    becomes_current: bool = True,
) -> PlannedVersion:
    """Add `draft` as the next number, unless it equals the current version but for number, time and key.

    It becomes current, if asked for and always where it is the first. Raises Conflict if it would during a
    rollout.
    """
    check_name(draft.function)
    head, current = known.head, known.current
    if head is None or current is None:
        first = replace(draft, version=known.last + 1)
        head = Function(
            name=draft.function,
            current=first.version,
            versions=(first.version,),
            scaling=scaling or Scaling(),
            created_at=draft.created_at,
            access=access(None),
        )
        return PlannedVersion(head=head, result=first, is_new=True)
    head = replace(head, scaling=scaling or head.scaling, access=access(head.access))
    same = replace(
        draft, version=current.version, created_at=current.created_at, deployed_by=current.deployed_by
    )
    if same == current:
        return PlannedVersion(head=head, result=current, is_new=False)
    new = replace(draft, version=known.last + 1)
    if becomes_current and head.active_rollout is not None:
        raise in_progress(head)
    current_number = new.version if becomes_current else head.current
    head = replace(head, versions=(*head.versions, new.version), current=current_number)
    return PlannedVersion(head=head, result=new, is_new=True)


def plan_current(head: Function, number: int, *, at: float) -> Function:
    """Return the head with another current version, and no rollout in progress. Raises NotFound."""
    if number not in head.versions:
        raise NotFound(f"function {head.name} has no version {number}")
    if (rollout := head.active_rollout) is not None:
        reason = f"version {number} was made current"
        head = end_rollout(head, rollout.id, RolloutState.ABORTED, reason, at=at)
    return replace(head, current=number)


def reserved(name: str) -> Conflict:
    return Conflict(f"the name {name!r} has secrets, so only an administrator deploys it first")


def no_function(name: str) -> NotFound:
    return NotFound(f"there is no function {name!r}")


def no_version(name: str, number: int) -> NotFound:
    return NotFound(f"function {name} has no version {number}")
