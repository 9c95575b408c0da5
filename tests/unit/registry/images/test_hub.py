"""Checkpoints of a hub: one commit, resolved once, recorded, and downloaded whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands.deploy import default_name
from registry.errors import CheckpointError
from registry.images.source import at_revision
from tests.fixtures.hub import FakeHub, serving

HUB_ID = "someone/some-model"
FIRST, SECOND = "1" * 40, "2" * 40
PROGRAM = """
import json, sys
from registry.images.source import checkpoint_from
found = checkpoint_from(sys.argv[1])
files = {path.name: path.read_text() for path in found.folder.iterdir()}
print(json.dumps([found.hub_id, found.commit, files]))
"""


def hub() -> FakeHub:
    commits = {
        FIRST: {"config.json": b'{"first": 1}', "notes.md": b"left out"},
        SECOND: {"config.json": b'{"second": 2}'},
    }
    return FakeHub(hub_id=HUB_ID, commits=commits, branches={"main": FIRST, "v2": SECOND})


def download(hub: FakeHub, name: str, cache: Path) -> subprocess.CompletedProcess[str]:
    # A process of its own: the hub's library reads its environment when it is imported.
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, name], env=environment, capture_output=True, text=True, check=False
    )


def test_a_branch_is_resolved_to_its_commit_once(tmp_path: Path) -> None:
    with serving(hub()) as served:
        served.moves["main"] = SECOND  # someone pushes as soon as the name was resolved
        done = download(served, HUB_ID, tmp_path / "cache")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [HUB_ID, FIRST, {"config.json": '{"first": 1}'}]
        assert all(FIRST in path for path in served.asked if "/tree/" in path or "/resolve/" in path)
        later = download(served, HUB_ID, tmp_path / "cache")
        assert json.loads(later.stdout)[1] == SECOND


@pytest.mark.parametrize(("revision", "commit"), [("v2", SECOND), (SECOND, SECOND), (FIRST, FIRST)])
def test_a_revision_can_be_named(tmp_path: Path, revision: str, commit: str) -> None:
    with serving(hub()) as served:
        done = download(served, f"{HUB_ID}@{revision}", tmp_path / "cache")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)[:2] == [HUB_ID, commit]


def test_an_unknown_revision_is_refused(tmp_path: Path) -> None:
    with serving(hub()) as served:
        done = download(served, f"{HUB_ID}@nothing", tmp_path / "cache")
    assert done.returncode == 1 and f"'{HUB_ID}@nothing' is neither" in done.stderr


def test_a_revision_is_for_a_hub_id(tmp_path: Path) -> None:
    assert at_revision(HUB_ID, "v2") == f"{HUB_ID}@v2" and at_revision(HUB_ID, None) == HUB_ID
    assert default_name(f"{HUB_ID}@v2") == "some-model"
    for name, revision in ((str(tmp_path), "v2"), (f"{HUB_ID}@v1", "v2"), (HUB_ID, "a b"), (HUB_ID, "../x")):
        with pytest.raises(CheckpointError):
            at_revision(name, revision)
