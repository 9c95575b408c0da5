"""Contexts: gateways that a user has logged in to, and which one a command talks to."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from benchmarks.harness.processes import ROOT
from cli.commands.login import default_name, is_readable_on_the_way
from cli.contexts import Context, config_path, delete_context, read_config, save_context, use_context
from cli.errors import UsageError
from cli.settings import resolve
from tests.fixtures.http_server import running_server
from tests.fixtures.patience import PATIENCE_S

KEY = "hc_0123456789abcdef_secret-of-the-test"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def test_a_context_gives_address_and_key_until_another_is_used(environ: dict[str, str]) -> None:
    path = config_path(environ)
    save_context(path, "a", Context(url="https://a", api_key="key-a", ca_file="/ca"))
    save_context(path, "b", Context(url="https://b", api_key="key-b"))
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    found = resolve(None, None, environ)
    assert (found.url, found.api_key, found.ca_file) == ("https://b", "key-b", None)
    use_context(path, "a")
    found = resolve(None, None, environ)
    assert (found.url, found.api_key, found.ca_file) == ("https://a", "key-a", Path("/ca"))
    delete_context(path, "a")
    assert resolve(None, None, environ).api_key is None, "none is current"
    assert list(read_config(path).contexts) == ["b"]
    assert "key" not in repr(read_config(path)) and "key-b" not in repr(read_config(path).contexts["b"])


def test_flags_and_named_contexts_win_over_the_environment(environ: dict[str, str]) -> None:
    path = config_path(environ)
    save_context(path, "a", Context(url="https://a", api_key="key-a"))
    save_context(path, "b", Context(url="https://b", api_key="key-b"))
    assert resolve(None, None, {**environ, "HYPERCAST_CONTEXT": "a"}).api_key == "key-a"
    environ |= {"HYPERCAST_URL": "https://env", "HYPERCAST_API_KEY": "key-env"}
    assert resolve(None, None, environ).api_key == "key-env"
    found = resolve(None, None, environ, context="a")
    assert (found.url, found.api_key) == ("https://a", "key-a")
    assert resolve(None, "flag", environ, context="a").api_key == "flag"
    with pytest.raises(UsageError, match="no context 'c'; contexts: a, b"):
        resolve(None, None, environ, context="c")


def test_a_gateway_never_gets_the_key_of_another(environ: dict[str, str]) -> None:
    save_context(config_path(environ), "a", Context(url="https://a", api_key="key-a", ca_file="/ca"))
    for given in (
        resolve("https://evil", None, environ),
        resolve(None, None, {**environ, "HYPERCAST_URL": "https://evil"}),
        resolve("http://a", None, environ),  # not encrypted
        resolve("https://evil", None, environ, context="a"),
    ):
        assert given.api_key is None and given.ca_file is None
    assert resolve("https://a/", None, environ).api_key == "key-a"


def test_what_a_user_wrote_into_the_file_stays(environ: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "dotfiles.toml"
    kept.write_text('# mine\nurl = "http://old"  # the old one\napi_key = "old"\n')
    path = config_path(environ)
    path.parent.mkdir()
    path.symlink_to(kept)
    save_context(path, "b.c", Context(url="https://b", api_key='quotes " and \\'))
    assert path.is_symlink() and "# the old one" in kept.read_text() and "# mine" in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert resolve(None, None, environ).api_key == 'quotes " and \\'
    delete_context(path, "b.c")
    assert resolve(None, None, environ).api_key == "old"
    assert not [one for one in path.parent.iterdir() if one != path] and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("current = 3", "Expected `str`"),
        ('[contexts.a]\nurl = "x"\npassword = "y"', "password"),
        ("[contexts", "line 1"),
        ('contexts = "x"', "Expected `object`"),
    ],
)
def test_a_bad_file_is_refused_without_showing_it(environ: dict[str, str], text: str, words: str) -> None:
    path = config_path(environ)
    path.parent.mkdir()
    path.write_text(f'api_key = "{KEY}"\n{text}\n')
    with pytest.raises(UsageError) as caught:
        resolve(None, None, environ)
    assert words in str(caught.value) or words == "line 1"
    assert str(path) in str(caught.value) and KEY not in str(caught.value)


def test_names_and_warnings_follow_from_the_address() -> None:
    assert default_name("https://hypercast.example.org") == "hypercast.example.org"
    assert default_name("http://127.0.0.1:8000") == "127.0.0.1-8000"
    assert default_name("http://[::1]:80") == "--1-80".strip("-")
    for address, expected in (
        ("https://x", False),
        ("http://127.0.0.1:1", False),
        ("http://localhost", False),
        ("http://[::1]:1", False),
        ("http://10.0.0.5", True),
        ("http://example.org", True),
    ):
        assert is_readable_on_the_way(address) is expected
    for wrong in ("http://", "http://x:port"):
        with pytest.raises(UsageError, match="bad address"):
            default_name(wrong)


class Gateway(BaseHTTPRequestHandler):
    """Knows one key."""

    def do_GET(self) -> None:
        known = self.headers["authorization"] == f"Bearer {KEY}"
        answers = {
            "/admin/me": {"role": "admin", "tenant": "admin"},
            "/admin/functions": {
                "functions": [{"name": "tiny-coder"}, {"name": "tiny-bert"}, {"name": "echo"}]
            },
            "/admin/nodes": {"nodes": [{"id": "node-0"}, {"id": "other"}]},
        }
        body = answers[self.path] if known else {"error": {"message": "no such key"}}
        content = json.dumps(body).encode()
        self.send_response(200 if known else 401)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server(Gateway) as url:
        yield url


def hypercast(
    folder: Path, *arguments: str, given: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HYPERCAST_")}
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        cwd=ROOT,
        env={**kept, "XDG_CONFIG_HOME": str(folder), **variables},
        input=given,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_login_checks_the_key_keeps_it_and_never_shows_it(url: str, tmp_path: Path) -> None:
    wrong = hypercast(tmp_path, "login", url, given="hc_1_wrong\n")
    assert wrong.returncode == 3 and "no such key" in wrong.stderr
    assert hypercast(tmp_path, "login", url).returncode == 3, "an empty stdin"
    assert not list(tmp_path.iterdir())
    done = hypercast(tmp_path, "login", url, "--name", "local", given=f"{KEY}\r\n", HYPERCAST_URL="http://x")
    assert done.returncode == 0, done.stderr
    assert "admin of tenant admin" in done.stderr and "HYPERCAST_URL" in done.stderr
    listed = hypercast(tmp_path, "context", "list", "-o", "json")
    (row,) = json.loads(listed.stdout)
    assert row == {"name": "local", "current": True, "url": url, "has_key": True, "ca_file": ""}
    used = hypercast(tmp_path, "list", "-o", "json", "--context", "nowhere")
    assert used.returncode == 2 and "contexts: local" in used.stderr
    names = [hypercast(tmp_path, "context", "use", name) for name in ("nowhere", "local")]
    assert [one.returncode for one in names] == [4, 0]
    table = hypercast(tmp_path, "context", "list", "-o", "wide")
    gone = hypercast(tmp_path, "context", "delete", "local")
    assert KEY not in (tmp_path / "hypercast" / "config.toml").read_text()
    for one in (wrong, done, listed, used, *names, table, gone):
        assert "secret-of-the-test" not in one.stdout + one.stderr


def test_a_shell_completes_names_with_the_key_of_the_context(url: str, tmp_path: Path) -> None:
    assert hypercast(tmp_path, "login", url, "--name", "local", given=KEY).returncode == 0

    def completed(*words: str) -> list[str]:
        done = hypercast(
            tmp_path,
            _HYPERCAST_COMPLETE="bash_complete",
            COMP_WORDS=" ".join(["hypercast", *words]),
            COMP_CWORD=str(len(words)),
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return [line.partition(",")[2] for line in done.stdout.splitlines() if line]

    assert completed("describe", "tiny") == ["tiny-bert", "tiny-coder"]
    assert completed("drain", "n") == ["node-0"]
    assert completed("warm", "echo", "--on", "o") == ["other"]
    assert completed("context", "use", "l") == ["local"]
    assert completed("set", "echo", "keep") == ["keep-alive="]
    assert completed("list", "--context", "lo") == ["local"]
    assert completed("describe", "--url", "http://127.0.0.1:9", "t") == [], "what fails completes nothing"
