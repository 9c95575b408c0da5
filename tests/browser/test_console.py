"""The console in a browser, on a real platform: deploy, a cast in progress, a stream, keys."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from tests.browser.browser import WIDTHS, Console, console
from tests.browser.load import calls_in_flight
from tests.fixtures.platform import ROOT, Platform

_ARRIVED = re.compile(r"(\d+) % arrived")
# What a screen reader could only call by its kind.
_UNNAMED = """
const named = (one) => one.innerText?.trim() || one.ariaLabel || one.labels?.length || one.title;
const all = document.querySelectorAll('a, button, input, select, textarea, [role=img]');
return [...all].filter((one) => !named(one)).map((one) => one.outerHTML);
"""
PAGES = ("", "functions", "casts", "jobs", "usage", "keys", "audit", "replay")
TABS = ("instances", "versions", "logs", "settings", "try")


@pytest.fixture(scope="module")
def opened(slow_links: Platform) -> Iterator[Console]:
    with console(slow_links.url) as page:
        yield page


@pytest.fixture
def page(opened: Console, slow_links: Platform) -> Iterator[Console]:
    """Yield the console, signed in as the admin; nothing may have failed in it at the end."""
    opened.resize(1280)
    opened.open()
    opened.run("sessionStorage.clear()")
    opened.driver.refresh()
    opened.find("input[name=key]")
    opened.faults()
    opened.sign_in(slow_links.key)
    yield opened
    assert opened.faults() == []


@pytest.fixture(scope="module")
def coder(slow_links: Platform) -> str:
    slow_links.run("deploy", str(ROOT / "functions" / "tiny-coder"))
    return "tiny-coder"


def test_a_key_is_entered_once_and_stays_in_the_tab(slow_links: Platform, opened: Console) -> None:
    opened.open()
    opened.find("input[name=key]").send_keys("hc_0123456789abcdef_" + "x" * 43, Keys.ENTER)
    assert "unknown, revoked or expired" in opened.find("[role=alert]").text
    assert opened.run("return sessionStorage.length") == 0
    opened.faults()  # of the 401
    opened.sign_in(slow_links.key)
    opened.open("#/functions")  # the page is loaded anew
    opened.find("h1", "Functions")
    assert (
        opened.run("return Object.values(localStorage).concat(document.cookie, location.href).join()").count(
            "hc_"
        )
        == 0
    )
    opened.click("button[aria-label='Sign out']")
    opened.find("input[name=key]")
    assert opened.run("return sessionStorage.length") == 0
    assert opened.faults() == []


def test_what_is_deployed_appears_by_itself(slow_links: Platform, page: Console) -> None:
    page.go("functions")
    page.find("h1", "Functions")
    slow_links.run("deploy", str(ROOT / "functions" / "echo"))
    page.find("td a", "echo")
    page.go("functions/echo/versions")
    page.find(".badge", "current")
    slow_links.run("deploy", str(ROOT / "functions" / "echo"), "--description", "again", check=False)
    slow_links.run("delete", "echo", "--yes")
    page.go("functions")
    page.until("echo is gone", lambda: "echo" not in page.texts("td a"))


def test_an_answer_streams_and_the_shown_call_is_the_same(
    slow_links: Platform, page: Console, coder: str
) -> None:
    page.go(f"functions/{coder}/try")
    page.find("textarea").send_keys("import os\nimport ")
    page.click("main button", "Run")
    page.until("there is an answer", lambda: len(page.texts("pre.answer")[0]) > 20)
    facts = page.until(
        "it ends",
        lambda: (
            page.run("return document.querySelector('pre.answer').ariaBusy") == "false"
            and page.texts(".facts")
        ),
    )
    assert "First token" in facts[0] and "Tokens/s" in facts[0]
    (command,) = page.texts(".code pre")
    assert slow_links.key not in command
    done = subprocess.run(
        ["bash", "-c", command.replace("curl -N", "curl -sN")],
        env={"PATH": "/usr/bin:/bin", "HYPERCAST_API_KEY": slow_links.key},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.rstrip().endswith("data: [DONE]"), done.stdout + done.stderr
    page.click("[role=tab]", "Python")
    (code,) = page.texts(".code pre")
    compile(code, "shown", "exec")
    assert "client.completions.create(" in code and '"import os\\nimport "' in code


def test_a_cast_fills_in_while_it_answers(slow_links: Platform, page: Console, coder: str) -> None:
    slow_links.run("scale", coder, "--instances", "1")
    page.go("casts")
    page.find("h1", "Casts")
    with calls_in_flight(slow_links, coder, [slow_links.key], 3):
        slow_links.run("scale", coder, "--instances", "4", "--no-wait")
        page.find(".lane")
        seen: set[int] = set()

        def whole() -> bool:
            lanes = page.texts(".lane")
            seen.update(int(share) for lane in lanes for share in _ARRIVED.findall(lane))
            return len(lanes) == 4 and all("5 of 5 layers" in lane or "ready" in lane for lane in lanes)

        page.until("all four nodes are ready", whole)
    assert len(seen - {0, 100}) >= 5, seen  # it was seen in progress
    assert float(page.texts(".stat")[3].split("\n")[1].replace(",", "")) > 0  # tokens per second
    page.go("casts")
    page.click("td a", f"{coder}:1")
    page.find(".card", "Transfers")
    assert "complete" in page.find(".card", "Transfers").text


def test_a_key_is_made_limited_and_revoked(slow_links: Platform, page: Console) -> None:
    page.go("keys")
    page.click("button", "Create a key")
    page.find("dialog input[name=tenant]").send_keys("acme")
    page.find("dialog input[name=requests_per_minute]").send_keys("600")
    page.find("dialog input[name=spend]").send_keys("2.5")
    page.click("dialog button", "Create")
    made = page.find("dialog .secret code").text
    page.click("dialog button", "Close")
    headers = {"authorization": f"Bearer {made}"}
    with httpx2.Client(base_url=slow_links.url, headers=headers, trust_env=False) as http:
        found = http.get("/admin/me").json()
        assert (found["tenant"], found["requests_per_minute"], found["spend_limit_nanos"]) == (
            "acme",
            600,
            2_500_000_000,
        )
        row = page.find("tr", found["id"])
        row.find_element(By.CSS_SELECTOR, f"button[aria-label='Revoke {found['id']}']").click()
        assert "cannot be taken back" in page.find("dialog").text
        page.find("dialog").send_keys(Keys.ESCAPE)  # not yet
        page.until("the dialog is closed", lambda: not page.texts("dialog"))
        assert http.get("/v1/models").status_code == 200
        page.click(f"button[aria-label='Revoke {found['id']}']")
        page.click("dialog button.danger", "Revoke")
        page.until("it is revoked", lambda: "revoked" in page.find("tr", found["id"]).text)
        assert http.get("/v1/models").status_code == 401


def test_tenants_see_their_own(slow_links: Platform, page: Console, coder: str) -> None:
    with slow_links.http() as http:
        keys = {
            role: http.post("/admin/keys", json={"tenant": "globex", "role": role}).json()["key"]
            for role in ("deployer", "caller")
        }
    for role, pages in (
        ("deployer", ["Overview", "Functions", "Casts", "Jobs", "Usage", "Keys"]),
        ("caller", ["Overview", "Functions", "Jobs", "Usage", "Keys"]),
    ):
        page.click("button[aria-label='Sign out']")
        page.sign_in(keys[role])
        assert page.texts("aside nav a") == pages
        page.go("functions")
        page.find("main a", coder)  # it is public: it can be called, and no more is seen of it
        assert coder not in page.texts("td a")
        page.go("keys")
        page.find("h2", "This key")
        assert "All keys" not in page.text()
    page.go("audit")
    page.find("[role=alert]")  # a caller may not see it
    page.faults()


def test_a_version_is_rolled_out_and_promoted(slow_links: Platform, page: Console, tmp_path: Path) -> None:
    echo = Path(shutil.copytree(ROOT / "functions" / "echo", tmp_path / "echo"))
    slow_links.run("deploy", str(echo), "--name", "rolled")
    with (echo / "handler.py").open("a") as handler:
        handler.write("# The second version.\n")
    slow_links.run("deploy", str(echo), "--name", "rolled", "--no-traffic")
    page.go("functions/rolled/versions")
    page.click("td button", "Roll out")
    share = page.find("dialog input[name=percent]")
    share.clear()
    share.send_keys("60", Keys.ENTER)
    page.find(".card-head .badge", "running")
    with slow_links.http() as http:
        for _ in range(20):
            assert http.post("/functions/rolled/invoke", json={}).status_code == 200
    page.until("its requests are shown", lambda: "0 (0.0 %)" in page.find(".card", "Rollout").text)
    page.click("button", "Change share")
    share = page.find("dialog input[name=percent]")
    assert share.get_attribute("value") == "60"
    share.clear()
    share.send_keys("25", Keys.ENTER)
    page.find(".card p", "25 % of the requests")
    for width in WIDTHS:
        page.resize(width)
        assert page.cut() == [], width
    page.click("button", "Promote")
    page.click("dialog button", "Promote")
    page.find(".card-head .badge", "promoted")
    page.until("version 2 is current", lambda: "current" in page.find("tbody tr", "2").text)
    slow_links.run("delete", "rolled", "--yes")


def test_jobs_are_listed_shown_and_cancelled(slow_links: Platform, page: Console, coder: str) -> None:
    def line(number: int) -> str:
        body = {"model": coder, "prompt": "def ", "max_tokens": 400, "ignore_eos": True}
        call = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        return json.dumps(call) + "\n"

    page.go("jobs")
    page.find("h1", "Jobs")
    with slow_links.http() as http:
        call = {"model": coder, "input": {"prompt": "def add(", "max_tokens": 4}}
        assert http.put("/predictions/of-the-browser", json=call).status_code in (200, 202)
        page.until("it has ended", lambda: "succeeded" in page.find("tr", "of-the-browser").text)
        page.click("button.link", "of-the-browser")
        page.find("dialog pre[aria-label=Output]", "completion_tokens")
        page.click("dialog button.primary", "Close")
        content = "".join(map(line, range(400)))
        form = {"file": ("calls.jsonl", content)}
        file = http.post("/v1/files", files=form, data={"purpose": "batch"}).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=asked).json()["id"]
    page.click("button", "Batches")
    page.until("it is in progress", lambda: "of 400 calls" in page.find("tr", batch).text)
    page.click(f"button[aria-label='Cancel {batch}']")
    page.click("dialog button.danger", "Cancel the job")
    page.until("it is cancelled", lambda: "cancelled" in page.find("tr", batch).text)
    assert page.texts("td strong") == ["/v1/completions"]


def test_usage_is_exported_with_the_key(
    slow_links: Platform, page: Console, coder: str, tmp_path: Path
) -> None:
    page.driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    with slow_links.http() as http:
        body = {"model": coder, "prompt": "def add(", "max_tokens": 4}
        assert http.post("/v1/completions", json=body).status_code == 200
    page.go("usage")
    page.click("button", "Export")
    page.click("dialog button", "Download")
    focus = page.until("it is downloaded", lambda: next(tmp_path.glob("hypercast-focus-*.csv"), None))
    page.until("it is whole", lambda: "\n" in focus.read_text())
    assert "BilledCost" in focus.read_text().split("\n")[0]
    page.until("the dialog is closed", lambda: not page.texts("dialog"))
    page.click("button", "Export")
    Select(page.find("dialog select")).select_by_value("openmeter")
    page.click("dialog button", "Download")
    events = page.until("it is downloaded", lambda: next(tmp_path.glob("hypercast-openmeter-*.jsonl"), None))
    page.until("it is whole", lambda: "\n" in events.read_text())
    assert json.loads(events.read_text().split("\n")[0])["specversion"] == "1.0"


def test_every_page_is_whole_in_both_widths_and_colours(page: Console, coder: str) -> None:
    for scheme in ("light", "dark"):
        page.colours(scheme)
        for width in WIDTHS:
            page.resize(width)
            for name in (*PAGES, *(f"functions/{coder}/{tab}" for tab in TABS)):
                page.go(name)
                page.find("h1")
                page.until(f"{name} is loaded", lambda: "Loading …" not in page.text())
                assert page.cut() == [], (name, width, scheme)
        background = page.run("return getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == (scheme == "dark")


def test_the_keyboard_reaches_everything(page: Console, coder: str) -> None:
    page.open(f"#/functions/{coder}/instances")
    page.driver.refresh()
    page.find("[role=tab]")
    page.driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    assert page.driver.switch_to.active_element.text == "Skip to the page"
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.driver.switch_to.active_element.get_attribute("id") == "main"
    page.find("[role=tab][aria-selected=true]").send_keys(Keys.ARROW_RIGHT)
    page.until("the next tab is open", lambda: page.find("[role=tab][aria-selected=true]").text == "Versions")
    assert page.run(_UNNAMED) == []
