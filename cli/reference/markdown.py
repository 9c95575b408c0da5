"""Markdown of generated pages."""

import re
from collections.abc import Iterable, Sequence


def code(text: str) -> str:
    """Return text as inline code, which a cell of a table may hold."""
    if "|" in text or "`" in text:  # what escapes these in a table differs between readers of Markdown
        escaped = re.sub(r"[^A-Za-z0-9\s]", lambda found: f"&#{ord(found[0])};", text)
        return f"<code>{escaped}</code>"
    return f"`{text}`"


def cell(text: str) -> str:
    """Return text as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, "" without rows; a column that is empty in each row is left out."""
    kept = [list(map(cell, row)) for row in rows]
    if not kept:
        return ""
    used = [index for index in range(len(head)) if any(row[index] for row in kept)]
    lines = [[head[index] for index in used], ["---"] * len(used)]
    lines += [[row[index] for index in used] for row in kept]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def block(text: str, language: str = "") -> str:
    """Return a block of code."""
    return f"```{language}\n{text.rstrip()}\n```\n\n"


def prose(text: str) -> str:
    """Return plain text so that nothing in it is markup, but for `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if index % 2 else re.sub(r"([*_<>\[\]])", r"\\\1", part) for index, part in enumerate(parts)
    )


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
