"""The site of the documents: what is on it, and that it loads nothing from other hosts."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
BUILT = ROOT / ".docs" / "site"


def load_outside() -> Callable[[str, str], list[str]]:
    """Return the check of the build, which is not part of a package."""
    spec = importlib.util.spec_from_file_location("outside", SITE / "outside.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[str, str], list[str]] = module.outside
    return found


outside = load_outside()


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ('<script src="https://cdn.example.org/x.js"></script>', ".html"),
        ("<img alt=x src=//cdn.example.org/x.png>", ".html"),
        ('<link rel="stylesheet" href="https://fonts.example.org/css?family=Roboto">', ".html"),
        ('<link href=https://fonts.example.org rel="preconnect">', ".html"),
        ('<pre class="mermaid"><code>graph</code></pre>', ".html"),
        ("@import 'https://fonts.example.org/css';", ".css"),
        ("a { background: url(//cdn.example.org/x.png) }", ".css"),
        ('load("https://cdn.example.org/x.min.js")', ".js"),
    ],
)
def test_what_would_be_loaded_from_other_hosts_is_found(text: str, suffix: str) -> None:
    assert len(outside(text, suffix)) == 1


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ('<a href="https://example.org/x.js">a link</a>', ".html"),
        ('<link rel="canonical" href="https://example.org/">', ".html"),
        ('<script src="assets/x.js"></script><img src="../x.png">', ".html"),
        ("a { background: url(data:image/svg+xml,x) }", ".css"),
        ('const help = "https://example.org/help"', ".js"),
    ],
)
def test_links_and_own_files_are_not(text: str, suffix: str) -> None:
    assert outside(text, suffix) == []


def test_every_document_is_in_the_navigation() -> None:
    text = re.sub(r"!!python/\S+ \{.*\}", "null", (SITE / "mkdocs.yml").read_text())
    sections = yaml.safe_load(text)["nav"]
    pages = {page for one in sections for group in one.values() for entry in group for page in entry.values()}
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert ours <= pages
    of_tree = {page for page in pages if not page.startswith("reference/")}
    assert all((ROOT / page).is_file() for page in of_tree)


def test_the_built_site_loads_nothing_from_other_hosts() -> None:
    if not (BUILT / "index.html").exists():
        pytest.skip("the site is not built: make docs")
    files = [path for path in BUILT.rglob("*") if path.suffix in (".html", ".css", ".js")]
    assert len(files) > 40
    found = {str(path.relative_to(BUILT)): outside(path.read_text(), path.suffix) for path in files}
    assert not {name: urls for name, urls in found.items() if urls}
    pages = [path.read_text() for path in files if path.name == "index.html"]
    assert all("default-src 'self'" in page for page in pages)  # so that a browser refuses it, too
