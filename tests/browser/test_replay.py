"""A recorded run in the browser, without a key and without a cluster."""

from collections.abc import Iterator

import pytest

from tests.browser.browser import Console, console
from tests.fixtures.platform import ROOT
from tests.fixtures.served_gateway import ServedGateway, served_gateway

RECORDED = ROOT / "benchmarks" / "results" / "live-picture-2026-11-23.json"


@pytest.fixture(scope="module")
def served() -> Iterator[ServedGateway]:
    with served_gateway() as one:
        yield one


def seek(page: Console, seconds: float) -> None:
    page.run(
        "const at = document.querySelector('input[type=range]'); at.value = arguments[0];"
        "at.dispatchEvent(new Event('input', {bubbles: true}))",
        seconds,
    )


def test_a_recorded_run_is_played_without_a_key(served: ServedGateway) -> None:
    with console(served.gateway.url) as page:
        page.open("#/replay")
        page.find("input[type=file]").send_keys(str(RECORDED))
        page.find(".player")
        page.click("button[aria-label=Pause]")
        seek(page, 1.0)
        page.until("the time is set", lambda: page.texts(".stat")[0].split("\n")[1] == "1.0 s")
        assert len(page.texts(".lane")) == 4 and "Pipelines\n0" in page.texts(".stat")[2]
        seek(page, 15.0)
        page.until("pipelines run", lambda: "runs layer" in "".join(page.texts(".lane")))
        assert page.texts(".stat")[1].split("\n")[1] == "0 of 4"
        seek(page, 24.0)
        page.until("all are ready", lambda: page.texts(".stat")[1].split("\n")[1] == "4 of 4")
        page.click("button[aria-label=Play]")
        page.until("it plays", lambda: float(page.texts(".stat")[0].split("\n")[1].split()[0]) > 24)
        assert page.cut() == [] and page.faults() == []


def test_another_file_is_refused_with_a_reason(served: ServedGateway) -> None:
    with console(served.gateway.url) as page:
        page.open("#/replay")
        page.find("input[type=file]").send_keys(
            str(ROOT / "benchmarks" / "results" / "starts-2026-11-21.json")
        )
        assert "has no recorded run" in page.find("[role=alert]").text
        page.find("input[type=file]").send_keys(str(ROOT / "README.md"))
        page.until("it says so", lambda: "is not JSON" in page.find("[role=alert]").text)
