"""All pages of the reference, as files."""

from collections.abc import Callable, Mapping
from pathlib import Path

from cli.reference.command_line import command_line_page
from cli.reference.http_api import operations_page, types_page
from cli.reference.metrics import metrics_page
from cli.reference.settings import settings_page

PAGES: Mapping[str, Callable[[], str]] = {
    "CLI.md": command_line_page,
    "HTTP-OPERATIONS.md": operations_page,
    "HTTP-TYPES.md": types_page,
    "METRICS.md": metrics_page,
    "SETTINGS.md": settings_page,
}


def write_pages(folder: Path) -> None:
    """Write each page whose text has changed, so that what watches the folder sees only changes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        path, text = folder / name, page()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
