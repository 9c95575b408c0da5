"""The plots beside the page, drawn from the result files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.result_files import ResultFiles
from benchmarks.paper.sources import Source, find_sources
from benchmarks.trace.plot import plot as plot_trace

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One plot of one source."""

    source: str
    says: str
    draw: Callable[[Rows, Path], None]

    @property
    def file(self) -> str:
        return f"paper-{self.source}.png"


def pictures(sources: Mapping[str, Source]) -> list[Picture]:
    """Return the plots of the sources that there are."""
    return [picture for picture in PICTURES if picture.source in sources]


def draw(results: Path) -> list[Path]:
    """Draw the plots of a folder's sources into it; return their files."""
    files, sources = ResultFiles(results), find_sources(results)
    written = []
    for picture in pictures(sources):
        source = sources[picture.source]
        rows = median_rows([files.records(file) for file in source.files])
        without = source.earlier.without if source.earlier else ()
        path = results / picture.file
        picture.draw([row for row in rows if row.get("name") not in without], path)
        written.append(path)
    return written


def median_rows(repeats: Sequence[Rows]) -> Rows:
    """Return each mode's record of the repeat with its median GPU time; all records of a single file."""
    if len(repeats) == 1:
        return repeats[0]
    found = []
    for name in dict.fromkeys(str(row["name"]) for rows in repeats for row in rows):
        same = [row for rows in repeats for row in rows if row["name"] == name]
        counting = [row for row in same if row.get("counts") is not False] or same
        found.append(sorted(counting, key=lambda row: float(row["gpu_s"]))[(len(counting) - 1) // 2])
    return found


PICTURES: Sequence[Picture] = tuple(
    Picture(source=source, says=says, draw=plot_trace)
    for source, says in (
        ("trace-conv-8-nodes", "The conversation trace, 8 nodes"),
        ("trace-conv-12-nodes", "The conversation trace, 12 nodes"),
        ("trace-code-8-nodes", "The code trace, 8 nodes"),
        ("trace-code-12-nodes", "The code trace, 12 nodes"),
        ("trace-burstgpt", "Arrivals fitted to BurstGPT, 8 nodes"),
        ("trace-12-functions", "12 functions, 8 nodes"),
    )
)
