"""The site of the documents in a browser: it fits, loads nothing from elsewhere, and is searched."""

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.browser.browser import WIDTHS, console
from tests.fixtures.platform import ROOT

SITE = ROOT / ".docs" / "site"
PAGES = ("tour/", "concepts/", "operations/", "reference/settings/")
# What sticks out to the right, but for what scrolls; and what was loaded from elsewhere.
_OUT = """
return [...document.querySelectorAll('.md-content *')].filter(one => {
  const box = one.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !one.closest('.md-typeset__scrollwrap, pre, .headerlink');
}).map(one => `${one.tagName} ${one.textContent.trim().slice(0, 40)}`);
"""
_LOADED = "return performance.getEntriesByType('resource').map(one => one.name)"


class _Quiet(SimpleHTTPRequestHandler):
    """A handler without a log."""

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built: make docs")
    handler = functools.partial(_Quiet, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_pages_fit_in_both_widths_and_colours(site: str) -> None:
    with console(site) as page:
        for width in WIDTHS:
            page.resize(width)
            for scheme, background in (("light", "default"), ("dark", "slate")):
                page.colours(scheme)
                for path in PAGES:
                    page.driver.get(f"{site}/{path}")
                    assert page.run(_OUT) == [], f"{path} at {width} px"
                    assert page.run("return document.body.dataset.mdColorScheme") == background
                    assert all(url.startswith(site) for url in page.run(_LOADED))
        assert page.faults() == []


def test_the_search_finds_a_setting(site: str) -> None:
    with console(site) as page:
        page.driver.get(f"{site}/")
        page.click(".md-search__input")
        page.find(".md-search__input").send_keys("served-copies")
        page.find(".md-search-result__link", "Settings")
        assert page.faults() == []
