"""Checks after requests were served while nodes loaded: each response, and the ledger's rows."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from benchmarks.live_serving.client import LiveAnswer, LiveRequest
from registry.records.usage import GpuSlice, RequestRecord, RequestStatus

Expected = Mapping[tuple[str, LiveRequest], Sequence[int]]  # by function and work


def wrong_answers(answers: Sequence[LiveAnswer], expected: Expected) -> list[str]:
    """Return responses that lost, repeated or changed a token, or failed."""
    findings = [answer.wrong(expected[answer.function, answer.work]) for answer in answers]
    return [line for line in findings if line]


def pipelines_of(row: RequestRecord) -> list[set[str]]:
    """Return the nodes of each pipeline that served a request: one call, several instances."""
    calls = ({part.node for part in parts} for parts in _calls(row).values())
    return [nodes for nodes in calls if len(nodes) > 1]


def wrong_rows(
    answers: Sequence[LiveAnswer],
    rows: Sequence[RequestRecord],
    unsure: Collection[str] = (),
    alone: Collection[str] = (),
) -> list[str]:
    """Return where the ledger does not hold each request once, as its client saw it.

    Each member of its pipelines must have its time. Killed instances, in `unsure`, may have unrecorded time.
    The requests in `alone` arrived while one node held the model: a loading node may have served them by
    itself.
    """
    by_id: dict[str, list[RequestRecord]] = defaultdict(list)
    for row in rows:
        by_id[row.response_id].append(row)
    failed = []
    for answer in answers:
        mine = by_id.pop(answer.request_id, [])
        if len(mine) != 1:
            failed.append(f"{answer} is in the ledger {len(mine)} times")
        else:
            failed += [f"{answer}: {what}" for what in _differences(answer, mine[0], unsure, alone)]
    return [*failed, *(f"{name} is in the ledger, but no client sent it" for name in by_id)]


def _differences(
    answer: LiveAnswer, row: RequestRecord, unsure: Collection[str], alone: Collection[str]
) -> list[str]:
    found = []
    expected = (answer.prompt_tokens, answer.completion_tokens, answer.start_kind)
    has = (row.prompt_tokens, row.completion_tokens, row.start_kind)
    if not answer.failure and row.status is not RequestStatus.OK:
        found.append(f"the ledger has status {row.status}")
    elif row.status is RequestStatus.OK and expected != has:
        found.append(f"the ledger has {has}, not {expected}")
    if row.billed_gpu_ms != -(-sum(part.gpu_us for part in row.gpu) // 1000):
        found.append(f"billed {row.billed_gpu_ms} ms for {row.gpu}")
    places = Counter((part.call_id, part.instance_id) for part in row.gpu)
    if places and max(places.values()) > 1:
        found.append(f"an instance appears twice in a call: {row.gpu}")
    elif row.start_kind == "live" and not pipelines_of(row) and answer.request_id not in alone:
        found.append(f"it was served live by a single node: {row.gpu}")
    if unpaid := [part.node for part in last_members(row, unsure) if not part.gpu_us]:
        found.append(f"no time recorded for {', '.join(unpaid)} in {row.gpu}")
    return found


def last_members(row: RequestRecord, unsure: Collection[str] = ()) -> list[GpuSlice]:
    """Return the instances of a request's last call, each of which must have time.

    Return none if one of them is `unsure`: that call may have been cut before reaching each stage.
    """
    calls = _calls(row)
    members = calls[max(calls, key=_order)] if calls else []
    return [] if any(part.instance_id in unsure for part in members) else members


def _order(call_id: str) -> tuple[int, int]:
    """Return the order of a call among its request's: ids end in /INDEX or /INDEX+ATTEMPT."""
    index, _, attempt = call_id.rpartition("/")[2].partition("+")
    return int(index.partition("-")[0]), int(attempt or 0)


def _calls(row: RequestRecord) -> dict[str, list[GpuSlice]]:
    found: dict[str, list[GpuSlice]] = defaultdict(list)
    for part in row.gpu:
        found[part.call_id].append(part)
    return found
