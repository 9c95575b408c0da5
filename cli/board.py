"""The cluster as GET /admin/watch shows it: frames in, rows for tables out. Pure."""

import base64
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from cli.tables import Row

Entries = Mapping[str, Row]

_STARTING = ("starting", "loading")


class ClusterBoard:
    """The entries of all frames so far, by kind and id."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Row]] = {}
        self.at = 0.0  # of the last frame, in Unix seconds

    def __repr__(self) -> str:
        return f"<ClusterBoard { {kind: len(entries) for kind, entries in self._entries.items()} }>"

    def apply(self, frame: Mapping[str, Any]) -> set[str]:
        """Take a frame; return the kinds that it changes, "full" among them if it replaces everything."""
        changed = {*frame["set"], *frame["gone"]}
        if frame["full"]:
            self._entries = {}
            changed.add("full")
        for kind, ids in frame["gone"].items():
            for id_ in ids:
                self._entries.get(kind, {}).pop(id_, None)
        for kind, entries in frame["set"].items():
            self._entries.setdefault(kind, {}).update(entries)
        self.at = frame["at"]
        return changed

    def copy(self) -> "ClusterBoard":
        """Return the board as it is now."""
        made = ClusterBoard()
        made._entries = {kind: dict(entries) for kind, entries in self._entries.items()}
        made.at = self.at
        return made

    def entries(self, kind: str) -> Entries:
        """Return the entries of a kind by id."""
        return self._entries.get(kind, {})

    def nodes(self) -> list[Row]:
        """Return the nodes by name, each with the instances on it."""
        on_node: dict[str, list[Row]] = defaultdict(list)
        for one in self.entries("instances").values():
            on_node[one["node"]].append(one)
        return [
            {"id": name, **node, "instances": on_node.get(name, [])}
            for name, node in sorted(self.entries("nodes").items())
        ]

    def functions(self) -> list[Row]:
        """Return the functions, the busiest first, each with its instances by state and its traffic."""
        states: dict[str, Counter[str]] = defaultdict(Counter)
        for one in self.entries("instances").values():
            if one["leads"]:
                states[one["function"]][one["state"]] += 1
        traffic = self._traffic()
        rows = []
        for name, function in self.entries("functions").items():
            ready = states[name]["ready"]
            starting = sum(states[name][state] for state in _STARTING)
            rows.append(
                {
                    "name": name,
                    **function,
                    "state": "ready" if ready else "loading" if starting else "asleep",
                    "ready": ready,
                    "starting": starting,
                    **traffic.get(name, _QUIET),
                }
            )
        order = ("in_flight", "held", "tokens_s", "requests_s", "ready", "starting")
        return sorted(rows, key=lambda row: (*(-row[field] for field in order), row["name"]))

    def casts(self) -> list[Row]:
        """Return the casts, the running ones first, then the latest, each with its progress in [0, 1]."""
        blocks = self.entries("blocks")
        rows = []
        for cast_id, cast in self.entries("casts").items():
            targets = [part for part in cast["parts"] if part["state"] != "source"]
            states = Counter(part["state"] for part in targets)
            held = [_held(part, blocks.get(f"{cast_id} {part['node']}")) for part in targets]
            rows.append(
                {
                    "cast_id": cast_id,
                    **cast,
                    "state": _outcome(states),
                    "done": states["complete"],
                    "targets": len(targets),
                    "progress": sum(held) / len(held) if held else 1.0,
                    "age_s": max(0.0, self.at - cast["started_at"]),
                }
            )
        return sorted(rows, key=lambda row: (not row["running"], -row["started_at"]))

    def totals(self) -> dict[str, Any]:
        """Return how many there are of everything by state, and the traffic of all functions."""
        functions, casts = self.functions(), self.casts()
        leading = [one for one in self.entries("instances").values() if one["leads"]]
        return {
            "nodes": dict(Counter(one["state"] for one in self.entries("nodes").values())),
            "functions": dict(Counter(row["state"] for row in functions)),
            "instances": dict(Counter(one["state"] for one in leading)),
            "casts": dict(Counter(row["state"] for row in casts)),
            **{field: sum(row[field] for row in functions) for field in _RATES},
        }

    def _traffic(self) -> dict[str, Row]:
        """Return the traffic of each function, summed over its versions; the TTFT is that of the busiest."""
        versions: dict[str, list[Row]] = defaultdict(list)
        for one in self.entries("traffic").values():
            versions[one["function"]].append(one)
        return {
            name: {
                **{field: sum(one[field] for one in found) for field in _RATES},
                "ttft_ms": max(found, key=lambda one: one["requests_s"])["ttft_ms"],
            }
            for name, found in versions.items()
        }


_RATES = ("in_flight", "held", "requests_s", "tokens_s")
_QUIET: Row = {**dict.fromkeys(_RATES, 0), "ttft_ms": None}


def _outcome(states: Counter[str]) -> str:
    """Return the state of a cast: running while a part is, else the worst of its parts."""
    return next((state for state in ("running", "failed", "lost", "cancelled") if states[state]), "complete")


def _held(part: Row, blocks: Row | None) -> float:
    """Return how much of the image a target of a cast holds."""
    if part["state"] == "complete":
        return 1.0
    if blocks is None or not blocks["cells"]:
        return 0.0
    bits = int.from_bytes(base64.b64decode(blocks["held"]), "little")
    return min(1.0, bits.bit_count() / blocks["cells"])


def counted(counts: Mapping[str, int], order: Sequence[str] = ()) -> str:
    """Return counts by state as `2 ready, 1 loading`, those of `order` first."""
    names = [*(name for name in order if name in counts), *sorted(counts.keys() - set(order))]
    return ", ".join(f"{counts[name]} {name}" for name in names if counts[name])
