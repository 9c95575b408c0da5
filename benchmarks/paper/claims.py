"""What the papers report (claims.toml), and what of ours stands beside it."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.result_files import FigureError, ResultFiles
from benchmarks.paper.sources import Sources

_SPREAD = ("min ", "max ")
CLAIMS = Path(__file__).with_name("claims.toml")


@dataclass(frozen=True, slots=True)
class Figure:
    """One of our figures: an expression of `benchmarks.harness.figures` over a source."""

    label: str
    source: str
    expression: str
    format: str
    unit: str

    @property
    def modes(self) -> set[str]:
        """The names of the records that the expression reads."""
        return set(re.findall(r"(?<![.\w-])([A-Za-z][\w-]*)\.", self.expression))

    def cell(self, sources: Sources, results: ResultFiles) -> str:
        """Return the marked figure, with the least and greatest of repeats; "" if no file has it."""
        values = self.values(sources, results)
        if not values:
            return ""
        middle, least, greatest = (format(value, self.format) for value in values)
        text = self._marked(middle + self.unit, "")
        if least == greatest:
            return text
        return (
            f"{text} ({'–'.join(self._marked(*one) for one in zip((least, greatest), _SPREAD, strict=True))})"
        )

    def values(self, sources: Sources, results: ResultFiles) -> Sequence[float]:
        """Return the median, least and greatest of repeats, nothing if no file has the figure."""
        if self.source not in sources:
            return ()
        try:
            found = [results.evaluate(f"{word}{self.source} {self.expression}") for word in ("", *_SPREAD)]
        except FigureError:
            return ()
        return [float(one) for one in found]

    def _marked(self, value: str, reduction: str) -> str:
        return f"{value}<!-- figure: {reduction}{self.source} {self.expression} {self.format} -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One row: what a figure of a paper reports, beside our figures, or beside `answer` without any."""

    paper: str
    figure: str
    reports: str
    ours: Sequence[Figure]
    differs: str
    effect: str
    part: str = ""
    answer: str = ""


def read_claims(path: Path = CLAIMS) -> list[Claim]:
    """Return the claims of a file."""
    rows = tomllib.loads(path.read_text())["claim"]
    return [Claim(**{**row, "ours": [Figure(*one) for one in row["ours"]]}) for row in rows]
