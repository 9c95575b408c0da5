"""The plots beside the page, drawn from the result files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.result_files import ResultFiles
from benchmarks.live_picture.draw import draw as draw_live_picture
from benchmarks.paper.charts import ABLATION_SOURCES, plot_ablation, plot_block_arrivals, plot_multicast
from benchmarks.paper.sources import Sources, find_sources
from benchmarks.scaleout.plot import plot as plot_scaleout
from benchmarks.trace.plot import plot as plot_trace

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One plot of some sources; `draw` gets the rows of each."""

    name: str
    says: str
    sources: Sequence[str]
    draw: Callable[[Mapping[str, Rows], Path], None]

    @property
    def file(self) -> str:
        return f"paper-{self.name}.png"


def pictures(sources: Sources) -> list[Picture]:
    """Return the plots of which there are all sources."""
    return [picture for picture in PICTURES if sources.keys() >= set(picture.sources)]


def draw(results: Path) -> list[Path]:
    """Draw the plots of a folder's sources into it; return their files."""
    files, sources = ResultFiles(results), find_sources(results)
    written = []
    for picture in pictures(sources):
        rows = {
            name: median_rows([files.records(file) for file in sources[name]]) for name in picture.sources
        }
        written.append(results / picture.file)
        picture.draw(rows, written[-1])
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


def _of(plot: Callable[[Rows, Path], None]) -> Callable[[Mapping[str, Rows], Path], None]:
    """Return a drawing of a single source."""
    return lambda rows, path: plot(next(iter(rows.values())), path)


def _picture(source: str, says: str, plot: Callable[[Rows, Path], None]) -> Picture:
    return Picture(name=source, says=says, sources=(source,), draw=_of(plot))


PICTURES: Sequence[Picture] = (
    *(
        _picture(source, says, plot_trace)
        for source, says in (
            ("trace-conv-8-nodes", "The conversation trace, 8 nodes"),
            ("trace-conv-12-nodes", "The conversation trace, 12 nodes"),
            ("trace-code-8-nodes", "The code trace, 8 nodes"),
            ("trace-code-12-nodes", "The code trace, 12 nodes"),
            ("trace-burstgpt", "Arrivals fitted to BurstGPT, 8 nodes"),
            ("trace-zero-code-8-nodes", "12 functions from zero, the code trace, 8 nodes"),
            ("trace-zero-code-12-nodes", "12 functions from zero, the code trace, 12 nodes"),
            ("trace-zero-conv-8-nodes", "12 functions from zero, the conversation trace, 8 nodes"),
            ("trace-zero-conv-12-nodes", "12 functions from zero, the conversation trace, 12 nodes"),
            ("trace-zero-copies", "12 functions from zero, casts from host copies, the code trace, 12 nodes"),
        )
    ),
    Picture(
        name="trace-ablation",
        says="What each technique adds, on the conversation trace",
        sources=ABLATION_SOURCES,
        draw=plot_ablation,
    ),
    *(
        _picture(f"scaleout-13b-k{k}", f"A burst of 50 requests, 13B, {k} of 8 nodes hold it", plot_scaleout)
        for k in (1, 2, 4)
    ),
    _picture("scaleout-13b-serving", "The same with two nodes that serve before", plot_scaleout),
    Picture(
        name="multicast",
        says="Arrival of blocks in casts over shaped links",
        sources=("multicast",),
        draw=_of(plot_block_arrivals),
    ),
    _picture("sim-multicast", "Casts of 7B, 13B and 70B, simulated", plot_multicast),
    _picture(
        "live-picture",
        "One load that serves meanwhile",
        lambda rows, path: draw_live_picture(rows[0], path),
    ),
)
