"""Which parts are done and which are to run (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.paper.parts import Part

Records = Sequence[Mapping[str, Any]]


class InvalidPlan(ValueError):
    """A name stands for no part."""


class State(StrEnum):
    """What there is of a part."""

    MISSING = "missing"
    INCOMPLETE = "incomplete"  # it was ended before its last record, or failed
    NOT_COUNTING = "does not count"  # by its own rules, such as a machine that was too busy
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parts that run, in this order, and why asked ones do not."""

    run: Sequence[Part]
    skipped: Mapping[str, str]

    @property
    def minutes(self) -> float:
        return sum(part.minutes for part in self.run)


def state_of(part: Part, records: Records | None) -> State:
    """Return a part's state by the records of its file, None without a file."""
    if records is None:
        return State.MISSING
    names = {record.get("name") for record in records}
    if not records or not names.issuperset(part.expects):
        return State.INCOMPLETE
    return State.NOT_COUNTING if faults(records) else State.DONE


def faults(records: Records) -> list[str]:
    """Return the records that do not count, with their reasons."""
    return [
        ": ".join([str(record.get("name")), *dict.fromkeys(_reasons(record))])
        for record in records
        if record.get("counts") is False
    ]


def named(parts: Mapping[str, Part], words: Sequence[str]) -> list[Part]:
    """Return the parts that the words name: each a whole name, or the first words of some.

    Raises InvalidPlan.
    """
    found: list[str] = []
    for word in words:
        matching = [word] if word in parts else [name for name in parts if name.startswith(f"{word}-")]
        if not matching:
            raise InvalidPlan(f"{word!r} is no part: python -m benchmarks.paper list shows them")
        found += matching
    return [parts[name] for name in parts if name in found]


def plan(
    parts: Mapping[str, Part],
    states: Mapping[str, State],
    *,
    asked: Sequence[str] = (),
    again: Sequence[str] = (),
    no_testbed: str = "",
) -> Plan:
    """Return what is to run: asked parts (all, if none is) that are not done, and those asked for again.

    `no_testbed` is why no testbed can be made. Raises InvalidPlan.
    """
    repeated = named(parts, again)
    wanted = named(parts, asked) if asked or again else list(parts.values())
    run: list[Part] = []
    skipped: dict[str, str] = {}
    for part in parts.values():
        if part not in wanted and part not in repeated:
            continue
        if states[part.name] is State.DONE and part not in repeated:
            skipped[part.name] = "done"
        elif part.testbed and no_testbed:
            skipped[part.name] = no_testbed
        else:
            run.append(part)
    return _in_order(run, states, skipped)


def _in_order(run: Sequence[Part], states: Mapping[str, State], skipped: dict[str, str]) -> Plan:
    """Leave out parts without the file that they read, and put the others after the part that writes it."""
    running = {part.name for part in run}
    for part in run:
        if part.after and part.after not in running and states[part.after] is not State.DONE:
            skipped[part.name] = f"needs {part.after}"
    kept = [part for part in run if part.name not in skipped]
    return Plan(run=sorted(kept, key=lambda part: bool(part.after)), skipped=skipped)


def better(new: Records, old: Records | None) -> bool:
    """Return whether records should replace older ones: they have at least as many that count."""
    return old is None or _counting(new) >= _counting(old)


def _counting(records: Records) -> int:
    return sum(record.get("counts") is not False for record in records)


def _reasons(record: Mapping[str, Any]) -> list[str]:
    return [str(reason) for run in record.get("runs", ()) for reason in run.get("faults", ())]
