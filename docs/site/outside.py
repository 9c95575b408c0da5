"""What a file of the site would load from other hosts."""

import re

# What a browser loads by itself. Links to follow (`<a href>`) are none of it.
_LOADED = re.compile(
    r"""<(?:script|img|iframe|embed|source|video|audio|object)\b[^>]*?\b(?:src|data|srcset)\s*=\s*["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?![^>]*\brel\s*=\s*["']?(?:canonical|next|prev)\b)[^>]*?\bhref\s*=\s*["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""",
    re.IGNORECASE,
)
# Scripts and styles that a script names, to load them later.
_NAMED = re.compile(r"""["'`]((?:https?:)?//[^"'`\s]+\.(?:js|mjs|css|json|wasm|woff2?))["'`]""")
# The theme loads this for diagrams alone; a page with one is refused.
_OF_DIAGRAMS = "https://unpkg.com/mermaid@"


def outside(text: str, suffix: str) -> list[str]:
    """Return what a file of the site, of this suffix, would load from other hosts."""
    found = ["".join(groups) for groups in _LOADED.findall(text)] if suffix in (".html", ".css") else []
    if suffix == ".js":
        found = [url for url in _NAMED.findall(text) if not url.startswith(_OF_DIAGRAMS)]
    if suffix == ".html" and re.search(r"""class=["']?mermaid\b""", text):
        found.append(_OF_DIAGRAMS)
    return found
