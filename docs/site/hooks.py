"""Hooks of MkDocs: the pages of the tree as pages of the site, which loads nothing from other hosts."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from outside import outside

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / ".docs" / "reference"
PACKAGES = ("benchmarks", "gateway", "invoker", "plugins", "rdmacast")
_LINK = re.compile(r"\]\(([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the tree, with what they link to, under their paths in the tree."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    pages += [path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("README.md"))]
    linked: set[Path] = set()
    for path in pages:
        name = path.relative_to(ROOT).as_posix()
        _add(files, config, path, name, address(name))
        linked.update((path.parent / link).resolve() for link in _LINK.findall(path.read_text()))
    for path in sorted(REFERENCE.glob("*.md")):
        name = f"reference/{path.name}"
        _add(files, config, path, name, address(name))
    for path in sorted(linked):
        if path.is_file() and path.suffix != ".md" and path.is_relative_to(ROOT):
            name = path.relative_to(ROOT).as_posix()
            _add(files, config, path, name, name)
    return files


def address(name: str) -> str:
    """Return the file of the site for a page of the tree: docs/TOUR.md is tour/index.html."""
    if name == "README.md":
        return "index.html"
    stem = name.removeprefix("docs/").removesuffix(".md").removesuffix("/README")
    return f"{stem.lower()}/index.html"


def on_post_build(config: MkDocsConfig) -> None:
    """Raise PluginError where the site would load something from another host."""
    site = Path(config.site_dir)
    checked = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".js")]
    found = [
        f"{path.relative_to(site)}: {url}"
        for path in checked
        for url in outside(path.read_text(errors="replace"), path.suffix)
    ]
    if found or not checked:
        raise PluginError("the site would load from other hosts:\n" + "\n".join(found))


def _add(files: Files, config: MkDocsConfig, path: Path, name: str, target: str) -> None:
    file = File.generated(config, name, abs_src_path=str(path))
    file.dest_uri = target
    files.append(file)
