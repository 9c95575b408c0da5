"""Write the figures and tables of documents from the result files that their markers name.

Rewrites the given Markdown files, by default README.md and docs/*.md, so that each marked figure and table is
the one in its file under benchmarks/results, and prints what it changed. With --check nothing is written:
each figure that differs is printed, and the exit status is 1. `benchmarks.harness.figures` explains the
markers:

    0.309 s<!-- figure: scaleout-13b-k4-host-2026-11-23.json hypercast.ttft_p90_s .3f -->

examples:
  python -m benchmarks.tables
  python -m benchmarks.tables --check docs/LIVE-SCALING.md
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.arguments import make_parser
from benchmarks.harness.figures import Difference, render
from benchmarks.harness.processes import ROOT
from benchmarks.harness.result_files import ResultFiles

RESULTS = ROOT / "benchmarks" / "results"


def update(
    documents: Sequence[Path], results: Path, *, check: bool
) -> tuple[list[Difference], list[Difference]]:
    """Rewrite the documents unless `check`; return all differences, and all markers that are wrong."""
    files = ResultFiles(results)
    changed: list[Difference] = []
    failed: list[Difference] = []
    for path in documents:
        text = path.read_text()
        rendered, differences, wrong = render(text, path, files)
        changed += differences
        failed += wrong
        if differences and not check:
            path.write_text(rendered)
    return changed, failed


def documents() -> list[Path]:
    """Return the documents with figures by default."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    parser = make_parser("benchmarks.tables", __doc__)
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="documents (default: README.md docs/*.md)")
    add("--check", action="store_true", help="write nothing; exit with 1 if a figure differs")
    add("--results", type=Path, default=RESULTS, help="folder of the result files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    try:
        changed, failed = update(args.files or documents(), args.results, check=args.check)
    except OSError as error:
        sys.exit(f"tables: {error}")
    for one in [*changed, *failed]:
        print(one)
    if failed or (args.check and changed):
        sys.exit(1)


if __name__ == "__main__":
    main()
