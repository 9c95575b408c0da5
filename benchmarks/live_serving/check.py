"""What has to hold after requests were served while nodes loaded: each answer, and the ledger's rows."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from benchmarks.live_serving_client import Answer, Work
from registry.usage import GpuSlice, RequestRecord, RequestStatus

Expected = Mapping[tuple[str, Work], Sequence[int]]  # by function and work


def wrong_answers(answers: Sequence[Answer], expected: Expected) -> list[str]:
    """Answers that lost, repeated or changed a token, or failed."""
    told = [answer.wrong(expected[answer.function, answer.work]) for answer in answers]
    return [line for line in told if line]


def pipelines_of(row: RequestRecord) -> list[set[str]]:
    """The nodes of each pipeline that worked on a request: one call, several instances."""
    calls = ({part.node for part in parts} for parts in _calls(row).values())
    return [nodes for nodes in calls if len(nodes) > 1]


def wrong_rows(
    answers: Sequence[Answer],
    rows: Sequence[RequestRecord],
    unsure: Collection[str] = (),
    alone: Collection[str] = (),
) -> list[str]:
    """Where the ledger does not hold each request once, as its client saw it, with the time of each member
    of its pipelines. Of the instances `unsure`, which were killed, some time may be known to nobody. The
    requests `alone` came while one node held the model: one that loads may have answered them by itself."""
    by_id: dict[str, list[RequestRecord]] = defaultdict(list)
    for row in rows:
        by_id[row.request_id.partition("~")[0]].append(row)
    failed = []
    for answer in answers:
        mine = by_id.pop(answer.request_id, [])
        if len(mine) != 1:
            failed.append(f"{answer} is {len(mine)} times in the ledger")
        else:
            failed += [f"{answer}: {what}" for what in _differences(answer, mine[0], unsure, alone)]
    return [*failed, *(f"{name} is in the ledger, and nobody asked for it" for name in by_id)]


def _differences(
    answer: Answer, row: RequestRecord, unsure: Collection[str], alone: Collection[str]
) -> list[str]:
    found = []
    told = (answer.prompt_tokens, answer.completion_tokens, answer.start_kind)
    has = (row.prompt_tokens, row.completion_tokens, row.start_kind)
    if not answer.failure and row.status is not RequestStatus.OK:
        found.append(f"the ledger says {row.status}")
    elif row.status is RequestStatus.OK and told != has:
        found.append(f"the ledger has {has}, not {told}")
    if row.billed_gpu_ms != -(-sum(part.gpu_us for part in row.gpu) // 1000):
        found.append(f"billed {row.billed_gpu_ms} ms for {row.gpu}")
    places = Counter((part.call_id, part.instance_id) for part in row.gpu)
    if places and max(places.values()) > 1:
        found.append(f"an instance is twice in a call: {row.gpu}")
    elif row.start_kind == "live" and not pipelines_of(row) and answer.request_id not in alone:
        found.append(f"it was served live, by no two nodes: {row.gpu}")
    if unpaid := [part.node for part in last_members(row, unsure) if not part.gpu_us]:
        found.append(f"nobody paid {', '.join(unpaid)} for its part of {row.gpu}")
    return found


def last_members(row: RequestRecord, unsure: Collection[str] = ()) -> list[GpuSlice]:
    """The instances that made a request's last token, each of which must have been paid: the members of its
    last call. Nobody if one of them is `unsure`: that call may have been cut short before it came to each
    stage, as any earlier one may."""
    calls = _calls(row)
    members = calls[max(calls, key=_number)] if calls else []
    return [] if any(part.instance_id in unsure for part in members) else members


def _number(call_id: str) -> int:
    """Which of its request's calls it is: ids end in /NUMBER-POOL."""
    return int(call_id.rpartition("/")[2].partition("-")[0])


def _calls(row: RequestRecord) -> dict[str, list[GpuSlice]]:
    found: dict[str, list[GpuSlice]] = defaultdict(list)
    for part in row.gpu:
        found[part.call_id].append(part)
    return found
