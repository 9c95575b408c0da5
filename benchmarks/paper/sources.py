"""The result files behind each name that claims use: those of its parts, or until then earlier ones."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper.parts import PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """A file that stands in for parts that have not run; `without` names records and fields not to quote."""

    file: str
    note: str
    without: Sequence[str] = ()


def _scaleout(name: str) -> Earlier:
    return Earlier(file=f"scaleout-13b-{name}-2026-11-23.json", note="one run of an earlier state")


EARLIER: Mapping[str, Earlier] = {
    "trace-conv-8-nodes": Earlier(
        file="trace-conv-first-half-8-nodes-2026-11-24.json",
        note="one run of an earlier policy, on the half of the trace for tuning",
        without=("serverlessllm", "slo_5x_attainment"),  # host copies left too early; not of fixed-full
    ),
    "sim-multicast": Earlier(file="multicast-sim-2026-11-21.json", note="without 12 nodes"),
    "multicast": Earlier(
        file="multicast-8-nodes-400mbit-d4be470-2026-11-22.json", note="8 nodes, of an earlier state"
    ),
    "scaleout-13b-k1": _scaleout("k1-host"),
    "scaleout-13b-k4": _scaleout("k4-host"),
    "scaleout-13b-warm": _scaleout("warm"),
    "scaleout-13b-order": _scaleout("k4-turned"),
    "ablation": Earlier(file="ablation-2026-11-22.json", note="an earlier state"),
    "starts": Earlier(file="starts-2026-11-21.json", note="an earlier state, another processor"),
    "scaleout-13b-k2": _scaleout("k2-host"),
    "live-picture": Earlier(file="live-picture-2026-11-23.json", note="an earlier state"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The files of one name, repeats of one run; `earlier` is set if they stand in for parts."""

    name: str
    files: Sequence[str]
    earlier: Earlier | None = None

    def quotes(self, expression: str) -> bool:
        """Return whether an expression names only records and fields that are quoted."""
        names = set(re.findall(r"[A-Za-z][\w-]*", expression))
        return self.earlier is None or names.isdisjoint(self.earlier.without)


def find_sources(results: Path) -> dict[str, Source]:
    """Return the sources of which a folder has a file."""
    found: dict[str, Source] = {}
    for name in dict.fromkeys(part.source for part in PARTS.values()):
        files = [part.file for part in PARTS.values() if part.source == name]
        there = [file for file in files if (results / file).exists()]
        earlier = EARLIER.get(name)
        if there:
            found[name] = Source(name=name, files=there)
        elif earlier is not None and (results / earlier.file).exists():
            found[name] = Source(name=name, files=[earlier.file], earlier=earlier)
    return found
