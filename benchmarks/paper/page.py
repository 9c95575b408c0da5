"""docs/RESULTS.md: the papers' figures beside ours, from the result files alone (pure but for the files)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.figures import render
from benchmarks.harness.processes import ROOT
from benchmarks.harness.result_files import FigureError, ResultFiles
from benchmarks.paper.claims import Claim, read_claims
from benchmarks.paper.headline import (
    FROM_ZERO,
    HEADLINE,
    LABELS,
    MEASURES,
    ROBUST,
    SCENARIOS,
    ZERO_COPIES,
    Measure,
    Row,
)
from benchmarks.paper.parts import FROM_ZERO_MODES, PARTS
from benchmarks.paper.pictures import pictures
from benchmarks.paper.plan import faults
from benchmarks.paper.sources import Sources, find_sources

PAGE = ROOT / "docs" / "RESULTS.md"
TEMPLATE = Path(__file__).with_name("page.md")
PAPERS = ("FaaScale and λScale", "BlitzScale")
NOTHING = "not measured yet"
UNCOUNTED = "no run counts"
OMITTED = "not in these runs"


@dataclass(frozen=True, slots=True)
class Page:
    """What a page is made from: the sources that there are, and their files."""

    sources: Sources
    results: ResultFiles
    path: Path

    def names(self) -> str:
        """Return the short names of the files, which the figures use."""
        lines = (f"{name}: {' '.join(files)}" for name, files in self.sources.items())
        return "\n".join(["<!-- results", *lines, "-->"])

    def dates(self) -> str:
        """Return the days of the records."""
        days = sorted({str(origin.get("date")) for _, origin in self._origins() if origin.get("date")})
        return f"{days[0]} to {days[-1]}" if len(days) > 1 else "".join(days) or "no files yet"

    def headline(self) -> str:
        """Return the rows of the headline for each scenario of one function that always has an instance."""
        return self._headline(SCENARIOS, HEADLINE)

    def from_zero(self) -> str:
        """Return those rows for each scenario of functions that scale to zero, and what the rest shows."""
        rows = [row for row in HEADLINE if row.modes <= set(FROM_ZERO_MODES)]
        tables = (
            self._measures((*FROM_ZERO, *ZERO_COPIES))
            if any(source in self.sources for source in FROM_ZERO)
            else ""
        )
        return "\n\n".join(one for one in (self._headline(FROM_ZERO, rows), tables) if one)

    def _headline(self, scenarios: Mapping[str, str], rows: Sequence[Row]) -> str:
        return _table(
            ["", "paper", "goal", *map(_scenario, scenarios)],
            [
                [row.label, row.reports, row.goal, *(self._verdict(row, source) for source in scenarios)]
                for row in rows
            ],
        )

    def traces(self) -> str:
        """Return one table for each measure, with a column for each scenario and a row for each mode."""
        return self._measures(tuple(SCENARIOS)) or f"{NOTHING}: `make paper PARTS=trace`."

    def _measures(self, sources: Sequence[str]) -> str:
        found = [source for source in sources if source in self.sources]
        tables = [self._measure(measure, found) for measure in MEASURES]
        return "\n\n".join(one for one in tables if one)

    def claims(self, claims: Sequence[Claim]) -> str:
        """Return a table of claims."""
        goals = claims[0].paper not in PAPERS
        heads = ["", "goal"] if goals else ["figure", "paper"]
        heads += ["ours", "what differs", "does emulation flatter or hurt us?"]
        rows = [[one.figure, one.reports, self._ours(one), one.differs, one.effect] for one in claims]
        return _table(heads, rows)

    def robust(self) -> str:
        """Return figures of runs that differ in one setting of the emulator or in the model."""
        found = {source: label for source, label in ROBUST.items() if source in self.sources}
        if not found:
            return f"{NOTHING}: {' '.join(f'`{source}`' for source in ROBUST)}."
        return _table(
            ["", *found.values()],
            [[row.label, *(self._verdict(row, source) for source in found)] for row in HEADLINE],
        )

    def pictures(self) -> str:
        """Return the plots of the sources that there are."""
        found = pictures(self.sources)
        return "\n\n".join(f"{one.says}:\n\n![{one.says}](../benchmarks/results/{one.file})" for one in found)

    def faults(self) -> str:
        """Return the records that do not count."""
        lines = [
            f"- `{file}`: {fault}" for file in self._files() for fault in faults(self.results.records(file))
        ]
        return "\n".join(lines) or "None of the runs behind this page."

    def missing(self) -> str:
        """Return the parts without a file."""
        written = {part.name for part in PARTS.values() if (self.results.folder / part.file).exists()}
        rows = [
            [f"`{part.name}`", f"{part.minutes:g}", part.shows]
            for part in PARTS.values()
            if part.name not in written
        ]
        if not rows:
            return "Every part has run."
        text = "`make paper PARTS=NAME` runs one."
        return f"{text}\n\n{_table(['part', 'minutes', 'what it shows'], rows)}"

    def files(self) -> str:
        """Return where each file is from."""
        origins = dict(self._origins())
        rows = [
            [
                f"[{file}](../benchmarks/results/{file})",
                str(origins[file].get("date", "")),
                _short(str(origins[file].get("commit", ""))),
                str(origins[file].get("machine", "")),
            ]
            for file in self._files()
        ]
        return _table(["file", "date", "commit", "machine"], rows)

    def _ours(self, claim: Claim) -> str:
        """Return a claim's figures, and what is missing."""
        cells = [(one, one.cell(self.sources, self.results)) for one in claim.ours]
        found = [f"{one.label}: {cell}" for one, cell in cells if cell]
        missing = dict.fromkeys(one.source for one, cell in cells if not cell)
        waiting = [name for name in missing if name not in self.sources]
        unrun = " ".join(f"`{name}`" for name in waiting or ([claim.part] if claim.part else []))
        if unrun:
            found.append(f"{'the rest ' if found else ''}{NOTHING}: {unrun}")
        return "; ".join(found) or claim.answer or UNCOUNTED

    def _verdict(self, row: Row, source: str) -> str:
        """Return a row's figure of a source, and whether it reaches the goal."""
        figure = replace(row.figure, source=source)
        values = figure.values(self.sources, self.results)
        if not values:
            if source not in self.sources:
                return NOTHING
            return UNCOUNTED if figure.modes <= _modes(source) else OMITTED
        cell = figure.cell(self.sources, self.results)
        return f"{cell} {'✓' if row.reached(values[0]) else '✗'}" if row.goal else cell

    def _measure(self, measure: Measure, sources: Sequence[str]) -> str:
        """Return the marker of a measure's table, empty if no file has it."""
        columns = [source for source in sources if self._has(measure, source, "hypercast")]
        rows = [name for name in LABELS if all(self._may(measure, source, name) for source in columns)]
        if not columns or not rows:
            return ""
        lines = [
            f"title: {measure.title}",
            f"value: {measure.field} {measure.format} {measure.unit}".rstrip(),
            *(["relative: hypercast .2f"] if measure.relative else []),
            *(f"column: {_scenario(source)}: {source}" for source in columns),
            *(f"row: {LABELS[name]}: {name}" for name in rows),
        ]
        return "\n".join(["<!-- table", *lines, "-->", "<!-- /table -->"])

    def _may(self, measure: Measure, source: str, name: str) -> bool:
        """Return whether a row may have this record's cell: it has the measure, or there is no record."""
        return not self.results.has(source, name) or self._has(measure, source, name)

    def _has(self, measure: Measure, source: str, name: str) -> bool:
        try:
            format(self.results.evaluate(f"{source} {name}.{measure.field}"), measure.format)
        except (FigureError, TypeError, ValueError):
            return False
        return True

    def _files(self) -> Sequence[str]:
        return [file for files in self.sources.values() for file in files]

    def _origins(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return each file with the facts about its run, which lie in `run` or in `params`."""
        found: list[tuple[str, Mapping[str, Any]]] = []
        for file in self._files():
            first = (self.results.records(file) or [{}])[0]
            params = first.get("params", {})
            found.append((file, {**params, **params.get("run", {}), **first.get("run", {})}))
        return found


def _scenario(source: str) -> str:
    """Return a scenario's heading."""
    return {**SCENARIOS, **FROM_ZERO, **ZERO_COPIES}[source]


def _modes(source: str) -> set[str]:
    return {name for part in PARTS.values() if part.source == source for name in part.expects}


def page(results: Path, path: Path = PAGE) -> str:
    """Return the page's text. Raises FigureError."""
    files = ResultFiles(results)
    sources = find_sources(results)
    files.short_names = sources
    made = Page(sources, files, path)
    text = TEMPLATE.read_text()
    claims = read_claims()
    for paper in dict.fromkeys(claim.paper for claim in claims):
        rows = [claim for claim in claims if claim.paper == paper]
        text = text.replace(f"{{{{claims {paper}}}}}", made.claims(rows))
    filled: Mapping[str, Callable[[], str]] = {
        "names": made.names,
        "dates": made.dates,
        "headline": made.headline,
        "from zero": made.from_zero,
        "traces": made.traces,
        "robust": made.robust,
        "pictures": made.pictures,
        "faults": made.faults,
        "missing": made.missing,
        "files": made.files,
    }
    for name, fill in filled.items():
        text = text.replace(f"{{{{{name}}}}}", fill())
    rendered, _, failed = render(text, path, files)
    if failed:
        raise FigureError("\n".join(map(str, failed)))
    return rendered


def write(results: Path, path: Path = PAGE) -> None:
    """Write the page. Raises FigureError, OSError."""
    path.write_text(page(results, path))


def _short(commit: str) -> str:
    """Return a short commit, with "+" if the tree differed from it."""
    return commit[:8] + "+" * commit.endswith("+")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
