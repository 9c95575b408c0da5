"""Debian's Chromium, driven by Selenium, as a person uses it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.fixtures.patience import until_seen

# Without what a browser fetches for itself: these machines have no network.
_FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--hide-scrollbars",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
    ),
)
WIDTHS = (1280, 390)
_HEIGHTS = {1280: 900, 390: 844}
# Two frames: what was laid out anew is drawn.
_DRAWN = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done));"

T = TypeVar("T")

# Elements that stick out of the page to the right, and texts that are cut.
_CUT = """
const found = [];
for (const one of document.querySelectorAll('body *')) {
  const box = one.getBoundingClientRect();
  if (!box.width || one.closest('.hidden, thead, .tabs, pre, .table-box, option, .skip')) continue;
  const name = `${one.tagName}.${one.className}`;
  if (box.right > innerWidth + 1) found.push(`${name} ends at ${Math.round(box.right)}`);
  const style = getComputedStyle(one);
  if (style.overflowX === 'hidden' && one.scrollWidth > one.clientWidth + 1 && one.textContent.trim())
    found.push(`${name} is cut: ${one.textContent.trim().slice(0, 40)}`);
}
return found;
"""


class Console:
    """The console in a browser."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def resize(self, width: int, height: int | None = None) -> None:
        metrics = {
            "width": width,
            "height": height or _HEIGHTS[width],
            "deviceScaleFactor": 1,
            "mobile": width < 600,
        }
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def colours(self, scheme: str) -> None:
        """Prefer `light` or `dark`, as a system does."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def open(self, at: str = "") -> None:
        self.driver.get(f"{self.url}/ui{at}")

    def go(self, page: str) -> None:
        """Go to a page, as a link does."""
        self.driver.execute_script("location.hash = arguments[0]", f"#/{page}")

    def sign_in(self, key: str) -> None:
        self.open()
        self.find("input[name=key]").send_keys(key, Keys.ENTER)
        self.find(".shell")

    def find(self, selector: str, text: str = "") -> WebElement:
        """Return the first element that is shown and has the text, as soon as there is one."""

        def look() -> WebElement | None:
            for one in self.driver.find_elements(By.CSS_SELECTOR, selector):
                try:
                    if one.is_displayed() and text in one.text:
                        return one
                except StaleElementReferenceException:
                    continue
            return None

        return until_seen(f"there is {selector} with {text!r}", look, failing=self.text)

    def click(self, selector: str, text: str = "") -> None:
        """Click it; one that is drawn anew meanwhile is looked for again."""

        def clicked() -> bool:
            try:
                self.find(selector, text).click()
            except StaleElementReferenceException:
                return False
            return True

        until_seen(f"{selector} with {text!r} is clicked", clicked)

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all that match, at one moment."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)"
        return self.run(script, selector)

    def text(self) -> str:
        return self.driver.find_element(By.TAG_NAME, "body").text

    def until(self, what: str, look: Callable[[], T]) -> T:
        return until_seen(what, look, failing=self.text)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def faults(self) -> list[str]:
        """Return what the browser complained of since the last look: errors, and what the policy refused."""
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] == "SEVERE"]  # type: ignore[no-untyped-call]

    def cut(self) -> list[str]:
        """Return what sticks out of the page, or is cut."""
        return self.run(_CUT)

    def picture(self, path: Path, width: int) -> None:
        """Take a picture of the whole page."""
        height = self.run("return document.documentElement.scrollHeight")
        self.resize(width, max(_HEIGHTS[width], min(height, 4000)))
        self.driver.execute_async_script(_DRAWN)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(path))
        self.resize(width)


@contextmanager
def console(url: str) -> Iterator[Console]:
    """Open the console in a browser with an empty profile."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        opened = Console(driver, url)
        opened.resize(1280)
        yield opened
    finally:
        driver.quit()
