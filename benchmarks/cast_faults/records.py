"""Records of a cast-faults run (pure)."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.cast_faults.run import Baseline, TrialResult
from benchmarks.cast_faults.trials import CastRole, CastVariant
from benchmarks.harness.percentile import percentile
from benchmarks.harness.records import timed
from benchmarks.multicast.run import sum_counts


def records(
    outcomes: Sequence[TrialResult], baseline: Baseline, limit: float, params: dict[str, object]
) -> list[dict[str, Any]]:
    """Return records per undisturbed variant; per role, transport and planner of the faults; and in total."""
    struck = [one for one in outcomes if one.was_hit]
    rows = [undisturbed(shape, baseline, outcomes, params) for shape in baseline.seconds]
    by: list[tuple[str, Callable[[TrialResult], str]]] = [
        ("role", _role),
        ("transport", lambda one: one.trial.shape.transport),
        ("planner", lambda one: one.trial.shape.planner),
        ("damage", lambda one: "damaged" if one.trial.damage else "whole"),
    ]
    for what, key in by:
        for value in sorted({key(one) for one in struck}):
            chosen = [one for one in struck if key(one) == value]
            rows.append(
                {"name": f"struck-{value}", "params": {what: value, **params}, **lost(chosen, baseline)}
            )
    return [*rows, whole(outcomes, struck, baseline, limit, params)]


def undisturbed(
    shape: CastVariant, baseline: Baseline, outcomes: Sequence[TrialResult], params: dict[str, object]
) -> dict[str, Any]:
    of_shape = [one for one in outcomes if one.trial.is_undisturbed and one.trial.shape == shape]
    seconds = [round(seconds, 4) for seconds in baseline.seconds[shape]]
    share = round(statistics.median(one.processors for one in of_shape), 3)
    named = {"transport": shape.transport, "planner": shape.planner, **params}
    return timed("undisturbed", named, seconds, processor_share=share)


def lost(struck: Sequence[TrialResult], baseline: Baseline) -> dict[str, Any]:
    """Return how much longer these took than undisturbed ones of their variant, as fractions."""
    shares = [baseline.lost_share(one) for one in struck]
    if not shares:
        return {"casts": 0}
    return {
        "casts": len(shares),
        "lost_share_median": round(statistics.median(shares), 4),
        "lost_share_p90": round(percentile(shares, 90) or 0.0, 4),
        "lost_share_max": round(max(shares), 4),
        "processor_share": round(statistics.median(one.processors for one in struck), 3),
    }


def whole(
    outcomes: Sequence[TrialResult],
    struck: Sequence[TrialResult],
    baseline: Baseline,
    limit: float,
    params: dict[str, object],
) -> dict[str, Any]:
    wrong = [f"{one.trial}: {what}" for one in outcomes for what in one.wrong]
    summary = lost(struck, baseline)
    returned = [one.returned for one in outcomes if one.returned is not None]
    return {
        "name": "cast-faults",
        "params": params,
        "all_casts": len(outcomes),
        "struck_too_late": sum(one.trial.strike is not None for one in outcomes) - len(struck),
        **summary,
        "lost_share_limit": limit,
        "holds": not wrong and summary.get("lost_share_median", 0.0) <= limit,
        "damaged_found": sum(one.found for one in outcomes),
        "damaged_missed": sum(one.missed for one in outcomes),
        "pulls": dict(sorted(sum_counts(one.faults for one in outcomes).items())),
        "returned": len(returned),
        "returned_kept_blocks": sum(one.kept_blocks for one in returned),
        "returned_median_s": round(statistics.median(one.seconds for one in returned), 3)
        if returned
        else None,
        "wrong": wrong,
        "each": [each_record(one, baseline) for one in struck],
    }


def each_record(one: TrialResult, baseline: Baseline) -> dict[str, Any]:
    strike = one.trial.strike
    assert strike is not None
    return {
        "transport": one.trial.shape.transport,
        "planner": one.trial.shape.planner,
        "role": strike.role,
        "rank": strike.rank,
        "at": round(strike.at, 3),
        "returns": strike.returns,
        "damage": one.trial.damage,
        "seconds": round(one.seconds, 4),
        "lost_share": round(baseline.lost_share(one), 4),
    }


def show(row: dict[str, Any]) -> str:
    """Format a record as one line; the last one also as the verdict, with a line per finding."""
    if row["name"] == "undisturbed":
        shape = f"{row['params']['transport']} {row['params']['planner']}"
        return f"{shape:28} median {row['median_s']:6.3f} s  CPU {row['processor_share']:4.0%}"
    parts = ("median", "p90", "max")
    shares = ", ".join(f"{part} {row.get(f'lost_share_{part}', 0.0):.1%}" for part in parts)
    line = f"{row['name']:28} {row['casts']:6} casts  time lost: {shares}"
    if row["name"] != "cast-faults":
        return line
    verdict = "holds" if row["holds"] else "DOES NOT HOLD"
    return "\n".join(
        [
            f"{line}; {row['struck_too_late']} more casts had ended before their fault",
            f"damaged blocks: {row['damaged_found']} found, {row['damaged_missed']} missed; "
            f"{row['returned']} nodes returned",
            f"{verdict}: median time lost at most {row['lost_share_limit']:.0%}, no findings",
            *(f"WRONG: {what}" for what in row["wrong"]),
        ]
    )


def _role(one: TrialResult) -> CastRole:
    assert one.trial.strike is not None
    return one.trial.strike.role
