"""What people are shown of a cast: the plan beside what its nodes told of it. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping

from gateway.schemas_casts import CastNode, CastOutcome, CastShown, PartState
from rdmacast.cast_limits import silence_s
from registry.cast import CastMember, CastProgress, CastRecord, CastState, CastStatus
from registry.node import NodeRecord

_TELLS_WITHIN_S = 30.0  # that it gave up, or began: Redis and the node may be held up
_NOTHING = CastProgress(
    cast_id="", node="", state=CastState.RUNNING, blocks=0, held=0, seconds=0.0, updated_at=0.0
)
_UNDER_WAY = ("waiting", "running")


def show(status: CastStatus, nodes: Mapping[str, NodeRecord], now: float) -> CastShown:
    """The cast at `now` (Unix seconds), with the nodes that are there."""
    record = status.record
    joined = {member.node: member.epoch for member in record.members}
    # Of one that came back, what its earlier part came to says nothing of the one that it is to begin.
    told = {one.node: one for one in status.progress if one.epoch >= joined.get(one.node, 0)}
    blocks = -(-record.nbytes // record.block_bytes)
    parts: list[CastNode] = []
    for index, member in enumerate(record.members):
        progress = told.get(member.node)
        state: PartState = "source"
        error = ""
        if index not in record.sources:
            state, error = _state(record, member, progress, nodes.get(member.node), now)
        parts.append(_part(member, progress, state, error, blocks=blocks, planned=index < record.planned))
    targets = [part for part in parts if part.state != "source"]
    state = _whole(targets)
    seconds = now - record.started_at
    if state != "running":
        ends = [part.updated_at for part in targets if part.updated_at is not None]
        seconds = max(ends, default=record.started_at) - record.started_at
    received = _sum(part.received for part in targets)
    longest_s = max((part.seconds for part in targets), default=0.0)
    return CastShown(
        cast_id=record.cast_id,
        function=record.function,
        version=record.version,
        image=record.image,
        nbytes=record.nbytes,
        blocks=blocks,
        block_bytes=record.block_bytes,
        planner=record.planner,
        reason=record.reason,
        epoch=record.epoch,
        state=state,
        done=sum(part.state == "complete" for part in targets),
        targets=len(targets),
        started_at=record.started_at,
        age_s=max(0.0, now - record.started_at),
        seconds=max(0.0, seconds),
        bytes_s=_rate(sum(received.values()), longest_s),
        received=received,
        faults=_sum(part.faults for part in targets),
        nodes=parts,
    )


def silent_s(block_bytes: int) -> float:
    """After so long a target to which nothing comes has given up, and said so."""
    return silence_s(block_bytes) + _TELLS_WITHIN_S


def _state(
    record: CastRecord,
    member: CastMember,
    progress: CastProgress | None,
    node: NodeRecord | None,
    now: float,
) -> tuple[PartState, str]:
    """Of a target, and why where it does not say so itself: no node tells of its own death."""
    if progress is not None and progress.is_final:
        return progress.state.value, progress.error
    joined_at = member.joined_at or record.started_at
    heard_at = joined_at if progress is None else progress.updated_at
    if node is None:
        return "lost", "its node is gone"
    if node.started_at > heard_at:
        return "lost", "its node began anew"
    if now - heard_at > silent_s(record.block_bytes):
        return "lost", "it never began" if progress is None else f"silent for {now - heard_at:.0f} s"
    return ("waiting", "") if progress is None else ("running", progress.error)


def _part(
    member: CastMember,
    progress: CastProgress | None,
    state: PartState,
    error: str,
    *,
    blocks: int,
    planned: bool,
) -> CastNode:
    told = progress or _NOTHING
    return CastNode(
        node=member.node,
        host=member.host,
        tier=member.tier.value,
        planned=planned,
        state=state,
        blocks=blocks,
        held=told.held,
        seconds=told.seconds,
        bytes_s=_rate(sum(told.received.values()), told.seconds),
        received=dict(told.received),
        transports=dict(told.transports),
        faults=dict(told.faults),
        error=error,
        updated_at=told.updated_at or None,  # 0: it was said in its stead that it failed
    )


def _whole(targets: list[CastNode]) -> CastOutcome:
    """Of the cast: running while one target is, else the worst that one came to."""
    states = {part.state for part in targets}
    if states & set(_UNDER_WAY):
        return "running"
    if states & {"failed", "lost"}:
        return "failed"
    return "cancelled" if "cancelled" in states else "complete"


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if seconds > 0 else 0.0
