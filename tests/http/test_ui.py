"""The console's files: how they are served, and that they need no other host."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import gateway
from gateway.ui.files import POLICY, ui_files
from registry.config.secrets import new_api_key
from registry.records.api_key import KeyRole
from tests.fixtures.gateway_http import gateway as running_gateway

_ADDRESS = re.compile(r"\b(?:https?:|wss?:)?//[a-z0-9-]+(?:\.[a-z0-9-]+)+", re.IGNORECASE)
# Names of vocabularies, which no browser opens.
_NAMESPACES = {"http://www.w3.org", "//www.w3.org"}
_IMPORT = re.compile(r"""\bfrom\s*["']([^"']+)["']""")
_REFERENCE = re.compile(r"""\b(?:src|href)="([^"]+)\"""")


async def test_the_page_and_its_files_need_no_key_and_obey_the_policy() -> None:
    async with running_gateway() as gw, gw.http("none") as http:
        page = await http.get("/ui")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert page.headers["content-security-policy"] == POLICY
        for reference in _REFERENCE.findall(page.text):
            assert (await http.get(f"/{reference}")).status_code == 200, reference
        for name, file in ui_files().items():
            found = await http.get(f"/ui/{name}")
            assert found.content == file.body
            assert found.headers["content-security-policy"] == POLICY
            assert found.headers["x-content-type-options"] == "nosniff"
        again = await http.get("/ui/app.js", headers={"if-none-match": ui_files()["app.js"].etag})
        assert (again.status_code, again.content) == (304, b"")
        plain = await http.get("/ui/app.js", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers and plain.content == ui_files()["app.js"].body


async def test_what_is_not_a_file_of_the_console_is_not_served() -> None:
    async with running_gateway() as gw, gw.http() as http:
        for path in (
            "/ui/files.py",
            "/ui/LICENSE.preact",
            "/ui/README.md",
            "/ui/..%2ffiles.py",
            "/ui/nothing.js",
        ):
            assert (await http.get(path)).status_code == 404, path


async def test_a_browser_is_sent_to_the_page_and_a_program_is_not() -> None:
    async with running_gateway() as gw, gw.http("none") as http:
        assert (await http.get("/")).json()["console"] == "/ui"
        sent = await http.get("/", headers={"accept": "text/html,*/*;q=0.8"})
        assert (sent.status_code, sent.headers["location"]) == (303, "ui")


def test_the_policy_allows_this_host_alone() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    for name in ("script-src", "style-src", "img-src", "connect-src"):
        assert rules[name] == "'self'"
    assert "unsafe" not in POLICY and "*" not in POLICY


def test_no_file_names_another_host_or_has_inline_code() -> None:
    for name, file in ui_files().items():
        text = file.body.decode()
        hosts = {found for found in _ADDRESS.findall(text) if found not in _NAMESPACES}
        assert not hosts, (name, hosts)
        if name.endswith(".js"):
            for imported in _IMPORT.findall(text):
                assert imported.removeprefix("./") in ui_files(), (name, imported)
            assert not re.search(r"\beval\(|new Function\(|document\.write|dangerouslySetInnerHTML=", text), (
                name
            )
        else:
            assert not re.search(r"<script(?![^>]*src=)|\bon\w+=|<style|\sstyle=|url\(", text), name


def test_libraries_are_as_published_and_have_their_licences() -> None:
    folder = Path(gateway.__file__).parent / "ui" / "vendor"
    assert "MIT License" in (folder / "LICENSE.preact").read_text()
    assert "Apache License" in (folder / "LICENSE.htm").read_text()
    listed = (folder / "README.md").read_text()
    for file in folder.glob("*.js"):
        assert f"`{file.name}`" in listed


def test_the_wheel_has_the_files(tmp_path: Path) -> None:
    root = Path(gateway.__file__).parents[1]
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            tmp_path,
            root,
        ],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        f"gateway/ui/static/{name}" for name in ("index.html", "app.js", "console.css", "icon.svg")
    } <= names
    assert {f"gateway/ui/vendor/{name}" for name in ("preact.js", "LICENSE.preact", "LICENSE.htm")} <= names


async def test_a_key_learns_what_it_is_and_may_do() -> None:
    async with running_gateway() as gw:
        limited = new_api_key("acme", KeyRole.CALLER, "ci")
        await gw.state.put_key(limited.key)
        async with gw.http(limited.plaintext) as http:
            found = (await http.get("/admin/me")).json()
            assert (found["id"], found["tenant"], found["role"]) == (limited.key.id, "acme", "caller")
            assert found["rights"] == ["call", "key", "read-usage"] and "digest" not in found
        async with gw.http() as http:
            patch = {"spend_limit_nanos": 10**9, "spend_period": "day", "max_concurrent": 2}
            assert (await http.patch(f"/admin/keys/{limited.key.id}", json=patch)).status_code == 200
        async with gw.http(limited.plaintext) as http:
            found = (await http.get("/admin/me")).json()
            assert (found["spent_nanos"], found["spend_period"], found["max_concurrent"]) == (0, "day", 2)
            assert found["currency"] == "USD"
        async with gw.http("none") as http:
            assert (await http.get("/admin/me")).status_code == 401
