"""Rotation of the cluster's secret in its file."""

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.commands.secret import secret_command
from rdmacast.protocol.handshake import secrets_of
from registry.config.rotation import cluster_secret, finish_rotation, rotate_secret
from registry.config.secrets import SECRET_VARIABLE, load_or_create_secret
from registry.errors import Conflict, InvalidRecord


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "cluster.secret"
    load_or_create_secret(made, {})
    return made


def test_a_running_process_follows_both_steps(path: Path) -> None:
    secret = cluster_secret(path, {})
    (old,) = secrets_of(secret)
    rotate_secret(path)
    new, former = secrets_of(secret)
    assert former == old and new != old and len(new) == 64
    assert load_or_create_secret(path, {}) == new
    finish_rotation(path)
    assert secrets_of(secret) == (new,)
    assert [*path.parent.iterdir()] == [path]


def test_steps_out_of_turn_change_nothing(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(Conflict, match="no rotation to finish"):
        finish_rotation(path)
    assert path.read_bytes() == before
    rotate_secret(path)
    before = path.read_bytes()
    with pytest.raises(Conflict, match="two secrets already"):
        rotate_secret(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("mode", "after"), [(0o600, 0o600), (0o640, 0o640), (0o664, 0o640), (0o400, 0o600)])
def test_only_owner_and_group_may_read_it(path: Path, mode: int, after: int) -> None:
    path.chmod(mode)
    former = path.stat()
    rotate_secret(path)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == after
    assert (status.st_uid, status.st_gid) == (former.st_uid, former.st_gid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_stays(path: Path) -> None:
    os.chown(path, 1234, 2345)
    rotate_secret(path)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    secret = cluster_secret(link, {})
    rotate_secret(link)
    assert link.is_symlink() and len(secrets_of(secret)) == 2


def test_a_failed_write_leaves_the_file(path: Path) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    with pytest.raises(OSError, match="No space"):
        rotate_secret(path, full)
    assert path.read_bytes() == before and [*path.parent.iterdir()] == [path]


def test_the_environment_stays_one_secret(path: Path) -> None:
    secret = cluster_secret(path, {SECRET_VARIABLE: "e" * 40})
    rotate_secret(path)
    assert secrets_of(secret) == (b"e" * 40,)


@pytest.mark.parametrize("text", ["", "x" * 32 + "\nshort\n", "\n".join("abc" * 20 for _ in range(3))])
def test_an_unusable_file_is_refused_at_the_start_and_ignored_later(path: Path, text: str) -> None:
    secret = cluster_secret(path, {})
    before = secrets_of(secret)
    path.write_text(text)
    assert secrets_of(secret) == before
    with pytest.raises(InvalidRecord):
        cluster_secret(path, {})
    with pytest.raises(InvalidRecord):
        rotate_secret(path)


def test_the_command_says_what_comes_next(path: Path) -> None:
    runner, command = CliRunner(), ["rotate", "--secret-file", str(path)]
    first = runner.invoke(secret_command, command)
    assert first.exit_code == 0 and "copy the file" in first.output and "--finish" in first.output
    secrets = path.read_text().split()
    assert not any(secret in first.output for secret in secrets)
    assert isinstance(runner.invoke(secret_command, command).exception, Conflict)
    last = runner.invoke(secret_command, [*command, "--finish"])
    assert last.exit_code == 0 and "copy it" in last.output
    assert path.read_text().split() == secrets[:1]
