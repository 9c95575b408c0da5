"""Take the pictures of docs/CONSOLE.md: `python -m tests.browser.pictures FOLDER`.

Starts a platform with slow links, gives it functions, tenants and load, and takes a picture of each page: in
FOLDER those of the document, in FOLDER/all every page at both widths and in both colours.
"""

import json
import sys
import tempfile
from pathlib import Path

import httpx2
from PIL import Image

from tests.browser.browser import WIDTHS, Console, console
from tests.browser.load import calls_in_flight
from tests.fixtures.platform import ROOT, Platform

_CODER, _NODES = "tiny-coder", 8
_COLOURS = 96  # of a picture: flat areas and text
_POINTS = "return document.querySelector('path.line').getAttribute('d').split('L').length"
PAGES = {
    "overview": "",
    "functions": "functions",
    "function": f"functions/{_CODER}/instances",
    "versions": f"functions/{_CODER}/versions",
    "logs": f"functions/{_CODER}/logs",
    "settings": f"functions/{_CODER}/settings",
    "try": f"functions/{_CODER}/try",
    "jobs": "jobs",
    "usage": "usage",
    "keys": "keys",
    "audit": "audit",
}


def fill(platform: Platform) -> list[str]:
    """Deploy functions and make keys of tenants; return the keys."""
    for name in (_CODER, "echo"):
        platform.run("deploy", str(ROOT / "functions" / name))
    for name in ("autocomplete", "code-review"):
        platform.run("deploy", str(ROOT / "functions" / _CODER), "--name", name)
    limits = {"requests_per_minute": 6000, "spend_limit_nanos": 25_000_000, "spend_period": "day"}
    with platform.http() as http:
        made = [
            http.post("/admin/keys", json={"tenant": tenant, "name": name, **more}).json()["key"]
            for tenant, name, more in (("acme", "ci", {}), ("globex", "web shop", limits))
        ]
        send_jobs(http)
    platform.run("deploy", str(ROOT / "functions" / _CODER), "--no-traffic", "--dtype", "bfloat16")
    platform.run("rollout", _CODER, "--to", "2", "--percent", "10", "--wait")
    return [platform.key, *made]


def send_jobs(http: httpx2.Client) -> None:
    """Send predictions, one of which fails, and a batch."""
    for name, prompt in (("summary-1041", "def add("), ("summary-1042", "class P"), ("bad-input", 5)):
        call = {"model": _CODER, "input": {"prompt": prompt, "max_tokens": 16}}
        http.put(f"/predictions/{name}", json=call, timeout=120)
    line = {"method": "POST", "url": "/v1/completions"}
    body = {"model": _CODER, "prompt": "def ", "max_tokens": 400, "ignore_eos": True}
    lines = [json.dumps({**line, "custom_id": str(index), "body": body}) for index in range(400)]
    form = {"file": ("calls.jsonl", "\n".join(lines))}
    file = http.post("/v1/files", files=form, data={"purpose": "batch"}).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    http.post("/v1/batches", json=batch)


def save(page: Console, path: Path, width: int) -> None:
    """Take a picture, with few colours."""
    page.picture(path, width)
    Image.open(path).convert("RGB").quantize(_COLOURS).save(path, optimize=True)


def cast(platform: Platform, page: Console, keys: list[str], out: Path) -> None:
    """Take pictures of a cast whose nodes answer while they load."""
    with platform.http() as http:
        # From two sources, whose targets begin with different halves: together they soon have all layers.
        http.post(f"/admin/functions/{_CODER}/warm", json={"nodes": 2}).read()
        http.patch(
            f"/admin/functions/{_CODER}", json={"scaling": {"live": "pipeline", "max_instances": _NODES}}
        )
        nodes = http.get("/admin/nodes").json()["nodes"]
        others = [one["id"] for one in nodes if f"{_CODER}:1" not in one["tiers"]["host"]]
        page.go("casts")
        page.find("h1", "Casts")
        with calls_in_flight(platform, _CODER, keys, 3):
            http.post(
                f"/admin/functions/{_CODER}/scale",
                json={"instances": len(others), "on": others, "wait": False},
            )
            page.until("pipelines run", lambda: "runs layer" in "".join(page.texts(".lane")))
            for scheme in ("light", "dark"):
                page.colours(scheme)
                for width in WIDTHS:
                    page.resize(width)
                    save(page, out / "all" / f"cast-{width}-{scheme}.png", width)
            page.colours("light")
            page.resize(1280)
            page.until("all are ready", lambda: "loading" not in "".join(page.texts(".lane")))
            page.go("")
            page.until("a chart has twenty points", lambda: page.run(_POINTS) >= 20)
            save(page, out / "all" / "busy-1280-light.png", 1280)


def main() -> None:
    out = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="hypercast-pictures-") as folder:
        flags = ("--nodes", str(_NODES), "--hosts", str(_NODES), "--link-rate", "12mbit")
        platform = Platform(Path(folder), (*flags, "--allow-handlers", "--allow-unconfined-handlers"))
        platform.up()
        try:
            keys = fill(platform)
            with console(platform.url) as page:
                page.sign_in(platform.key)
                cast(platform, page, keys, out)
                for scheme in ("light", "dark"):
                    page.colours(scheme)
                    for name, at in PAGES.items():
                        for width in WIDTHS:
                            page.resize(width)
                            page.go(at)
                            page.until("it is loaded", lambda: "Loading …" not in page.text())
                            save(page, out / "all" / f"{name}-{width}-{scheme}.png", width)
                page.go("replay")
                recorded = ROOT / "benchmarks" / "results" / "live-picture-2026-11-23.json"
                page.find("input[type=file]").send_keys(str(recorded))
                page.click("button[aria-label=Pause]")
                page.run(
                    "const at = document.querySelector('input[type=range]'); at.value = 16.4;"
                    "at.dispatchEvent(new Event('input', {bubbles: true}))"
                )
                for width in WIDTHS:
                    page.resize(width)
                    save(page, out / "all" / f"replay-{width}-dark.png", width)
                print("faults:", page.faults())
        finally:
            platform.down()


if __name__ == "__main__":
    main()
