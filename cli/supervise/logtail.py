"""The last lines of a log file, for error messages."""

from pathlib import Path

READ_BYTES = 16 * 1024


def tail(path: Path, lines: int = 15, start: int = 0) -> str:
    """Return the last lines of a file from byte `start` on, indented; a note if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - READ_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return f"  (no log at {path})"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or f"  ({path} is empty)"
