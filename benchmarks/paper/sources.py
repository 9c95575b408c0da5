"""The result files behind each name that claims use: those of its parts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.paper.parts import PARTS

# The files of a name are repeats of one run.
Sources = Mapping[str, Sequence[str]]


def find_sources(results: Path) -> dict[str, Sequence[str]]:
    """Return the files of each name of which a folder has some."""
    found: dict[str, Sequence[str]] = {}
    for name in dict.fromkeys(part.source for part in PARTS.values()):
        files = [part.file for part in PARTS.values() if part.source == name]
        if there := [file for file in files if (results / file).exists()]:
            found[name] = there
    return found
