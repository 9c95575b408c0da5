"""A cast as /admin/casts shows it: its plan beside the progress that its nodes reported. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from gateway.schemas.casts import CastNodeView, CastOutcome, CastView, PartState
from rdmacast.cast.limits import silence_s
from rdmacast.cast.record import CastMember
from registry.records.cast import CastProgress, CastRecord, CastState, CastStatus
from registry.records.node import NodeRecord

_MAX_REPORT_DELAY_S = 30.0  # of its start or end: Redis and the node may be slow
_NOTHING = CastProgress(
    cast_id="", node="", state=CastState.RUNNING, blocks=0, held=0, seconds=0.0, updated_at=0.0
)
_UNDER_WAY = ("waiting", "running")


def show(status: CastStatus, nodes: Mapping[str, NodeRecord], now: float) -> CastView:
    """Return the cast at `now` (Unix seconds); `nodes` are those that are up."""
    record = status.record
    blocks = -(-record.nbytes // record.block_bytes)
    parts = list(_parts(status, nodes, now, blocks))
    targets = [part for part in parts if part.state != "source"]
    state = _whole(targets)
    seconds = now - record.started_at
    if state != "running":
        ends = [part.updated_at for part in targets if part.updated_at is not None]
        seconds = max(ends, default=record.started_at) - record.started_at
    received = _sum(part.received for part in targets)
    longest_s = max((part.seconds for part in targets), default=0.0)
    return CastView(
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


def _parts(
    status: CastStatus, nodes: Mapping[str, NodeRecord], now: float, blocks: int
) -> Iterator[CastNodeView]:
    record = status.record
    joined = {member.node: member.epoch for member in record.members}
    # The progress of a node before it rejoined says nothing of its new part.
    reported = {one.node: one for one in status.progress if one.epoch >= joined.get(one.node, 0)}
    for index, member in enumerate(record.members):
        progress = reported.get(member.node)
        state: PartState = "source"
        error = ""
        if index not in record.sources:
            state, error = _state(record, member, progress, nodes.get(member.node), now)
        yield _part(member, progress, state, error, blocks=blocks, planned=index < record.planned)


def silent_s(block_bytes: int) -> float:
    """Return the seconds after which a target that receives nothing has failed and reported it."""
    return silence_s(block_bytes) + _MAX_REPORT_DELAY_S


def _state(
    record: CastRecord,
    member: CastMember,
    progress: CastProgress | None,
    node: NodeRecord | None,
    now: float,
) -> tuple[PartState, str]:
    """Return a target's state, and the reason where it cannot report it itself, as when its node died."""
    if progress is not None and progress.is_final:
        return progress.state.value, progress.error
    joined_at = member.joined_at or record.started_at
    reported_at = joined_at if progress is None else progress.updated_at
    if node is None:
        return "lost", "its node has left"
    if node.started_at > reported_at:
        return "lost", "its node restarted"
    if now - reported_at > silent_s(record.block_bytes):
        return "lost", "it never started" if progress is None else f"silent for {now - reported_at:.0f} s"
    return ("waiting", "") if progress is None else ("running", progress.error)


def _part(
    member: CastMember,
    progress: CastProgress | None,
    state: PartState,
    error: str,
    *,
    blocks: int,
    planned: bool,
) -> CastNodeView:
    reported = progress or _NOTHING
    return CastNodeView(
        node=member.node,
        host=member.host,
        tier=member.tier,
        planned=planned,
        state=state,
        blocks=blocks,
        held=reported.held,
        seconds=reported.seconds,
        bytes_s=_rate(sum(reported.received.values()), reported.seconds),
        received=dict(reported.received),
        transports=dict(reported.transports),
        faults=dict(reported.faults),
        error=error,
        updated_at=reported.updated_at or None,  # 0: it was said in its stead that it failed
    )


def _whole(targets: list[CastNodeView]) -> CastOutcome:
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
