"""API keys and secret files."""

import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from registry.clock import FakeClock
from registry.config.secrets import (
    SECRET_VARIABLE,
    check_usable,
    load_or_create_admin_key,
    load_or_create_secret,
    matches,
    new_api_key,
    parse_key,
    secret_beside,
)
from registry.errors import InvalidRecord, KeyRefused
from registry.memory.state import MemoryState
from registry.records.api_key import KeyRole


def test_a_new_key_matches_its_record_and_no_other():
    clock = FakeClock()
    key, plaintext = new_api_key("acme", KeyRole.CALLER, "ci", functions=["tiny"], clock=clock)
    other = new_api_key("acme", KeyRole.CALLER, "ci")
    assert plaintext.startswith(f"hc_{key.id}_")
    assert (key.created_at, key.functions) == (clock.wall_s(), ("tiny",))
    assert matches(key, parse_key(plaintext))
    assert matches(key, parse_key(f" {plaintext}\n"))
    assert not matches(key, parse_key(other.plaintext))
    assert not matches(replace(other.key, digest=key.digest), parse_key(plaintext))
    secret = parse_key(plaintext).secret
    assert secret not in repr(key) and secret not in repr(parse_key(plaintext))
    with pytest.raises(InvalidRecord):
        new_api_key("", KeyRole.CALLER, "ci")


@pytest.mark.parametrize(
    "bad", ["", "hc_", "hc_abcd_", "sk-123", "hc_abcd_short", "hc_AB_" + "x" * 43, "é" * 60]
)
def test_what_is_no_key_is_refused(bad: str):
    with pytest.raises(KeyRefused):
        parse_key(bad)


def test_a_key_ends_at_its_time_or_when_it_is_revoked():
    key = new_api_key("acme", KeyRole.CALLER, "ci", expires_at=100.0).key
    assert check_usable(key, 99.9) == key
    with pytest.raises(KeyRefused, match="expired"):
        check_usable(key, 100.0)
    with pytest.raises(KeyRefused, match="revoked"):
        check_usable(replace(key, revoked_at=50.0), 51.0)


def test_the_cluster_secret_is_made_once_and_private(tmp_path: Path):
    path = tmp_path / "deep" / "cluster.secret"
    secret = load_or_create_secret(path, {})
    assert len(secret) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_secret(path, {}) == secret
    assert [file.name for file in path.parent.iterdir()] == ["cluster.secret"]


def test_of_many_first_starts_one_makes_the_secret(tmp_path: Path):
    path = tmp_path / "cluster.secret"
    with ThreadPoolExecutor(16) as threads:
        made = list(threads.map(lambda _: load_or_create_secret(path, {}), range(64)))
    assert len(set(made)) == 1


def test_the_environment_gives_the_secret_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "cluster.secret"
    monkeypatch.setenv(SECRET_VARIABLE, " a secret of more than thirty-two bytes\n")
    assert load_or_create_secret(path) == b"a secret of more than thirty-two bytes"
    assert load_or_create_secret(None) == b"a secret of more than thirty-two bytes"
    assert not path.exists()


def test_a_weak_or_missing_secret_is_refused(tmp_path: Path):
    path = tmp_path / "cluster.secret"
    path.write_text("short\n")
    with pytest.raises(InvalidRecord, match=r"cluster\.secret is too short"):
        load_or_create_secret(path, {})
    with pytest.raises(InvalidRecord, match=f"{SECRET_VARIABLE} is too short.*32.*openssl rand -hex 32"):
        load_or_create_secret(path, {SECRET_VARIABLE: "a secret of 31 characters, weak"})
    assert len(load_or_create_secret(path, {SECRET_VARIABLE: "x" * 32})) == 32
    with pytest.raises(InvalidRecord, match="no cluster secret"):
        load_or_create_secret(None, {})


async def test_the_admin_key_is_made_once_and_known_to_each_new_state(tmp_path: Path):
    path = tmp_path / "admin.key"
    state = MemoryState()
    plaintext = await load_or_create_admin_key(path, state)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await load_or_create_admin_key(path, state) == plaintext
    (key,) = await state.keys()
    assert key.role is KeyRole.ADMIN
    fresh = MemoryState()
    assert await load_or_create_admin_key(path, fresh) == plaintext
    known = await fresh.key(parse_key(plaintext).id)
    assert known.role is KeyRole.ADMIN and matches(known, parse_key(plaintext))
    await state.put_key(replace(key, revoked_at=1.0))
    await load_or_create_admin_key(path, state)
    assert (await state.key(key.id)).revoked_at == 1.0
    await state.put_key(replace(key, digest="0" * 64))
    with pytest.raises(InvalidRecord, match="the secret differs"):
        await load_or_create_admin_key(path, state)
    path.write_text("rubbish")
    with pytest.raises(InvalidRecord, match="contains no API key"):
        await load_or_create_admin_key(path, state)


def test_the_secret_beside_an_embedded_redis(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/redis.sock?db=0"
    assert secret_beside(url) is None
    (tmp_path / "cluster.secret").write_text("x" * 32)
    assert secret_beside(url) == tmp_path / "cluster.secret"
    assert secret_beside(f"unix://:password@{tmp_path}/redis.sock") == tmp_path / "cluster.secret"
    assert secret_beside("redis://localhost:6379/0") is None
