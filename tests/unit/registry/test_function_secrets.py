"""Secrets at rest: bound to their names, opened by each cluster secret of a rotation; bounds and names."""

import dataclasses

import pytest

pytest.importorskip("cryptography")

from registry.clock import FakeClock
from registry.config.function_secrets import SecretVault, check_secret_key
from registry.config.function_yaml import parse_function_yaml
from registry.config.sealing import seal, unseal
from registry.errors import InvalidRecord, NotFound
from registry.memory.state import MemoryState
from registry.records.secret import MAX_SECRET_BYTES, MAX_SECRETS, MAX_SECRETS_BYTES

OLD, NEW = b"the first cluster secret", b"the second cluster secret"


def test_a_ciphertext_opens_under_its_own_names_only() -> None:
    sealed = seal(OLD, b"value", "chat", "TOKEN")
    assert b"value" not in sealed and seal(OLD, b"value", "chat", "TOKEN") != sealed
    assert unseal([NEW, OLD], sealed, "chat", "TOKEN") == (1, b"value")
    for names in (("other", "TOKEN"), ("chat", "OTHER"), ("chatT", "OKEN"), ("chat",)):
        with pytest.raises(InvalidRecord, match="another cluster secret, or is damaged"):
            unseal([OLD], sealed, *names)
    damaged = (sealed[:-1] + bytes([sealed[-1] ^ 1]), sealed[:20], b"", sealed + b"\0")
    for bad in damaged:
        with pytest.raises(InvalidRecord, match="damaged"):
            unseal([OLD], bad, "chat", "TOKEN")


async def test_secrets_survive_the_rotation_of_the_clusters_secret() -> None:
    state, clock = MemoryState(), FakeClock()
    await SecretVault(state, OLD).put("chat", "TOKEN", "value", clock)
    await SecretVault(state, b"a lost cluster secret").put("chat", "LOST", "value", clock)
    both = SecretVault(state, lambda: [NEW, OLD])
    assert await both.values("chat", ["TOKEN"]) == {"TOKEN": "value"}
    first = await both.reencrypt()
    assert (first.reencrypted, first.unreadable) == (("chat/TOKEN",), ("chat/LOST",))
    assert (await both.reencrypt()).reencrypted == ()
    assert await SecretVault(state, NEW).values("chat", ["TOKEN"]) == {"TOKEN": "value"}
    with pytest.raises(InvalidRecord, match="chat LOST cannot be decrypted"):
        await both.values("chat", ["LOST"])


async def test_a_missing_secret_is_named_with_its_command() -> None:
    with pytest.raises(NotFound, match=r"needs the secrets A, B, .*`hypercast secrets set chat A`"):
        await SecretVault(MemoryState(), OLD).values("chat", ["A", "B"])


async def test_number_and_sizes_are_bounded() -> None:
    state, clock = MemoryState(), FakeClock()
    vault = SecretVault(state, OLD)
    for value in ("", "a\0b", "x" * (MAX_SECRET_BYTES + 1), "é" * (MAX_SECRET_BYTES // 2 + 1)):
        with pytest.raises(InvalidRecord, match="1 to 16384 bytes") as raised:
            await vault.put("chat", "KEY", value, clock)
        assert value[:3] not in str(raised.value) or not value
    for number in range(MAX_SECRETS_BYTES // MAX_SECRET_BYTES):
        await vault.put("chat", f"KEY_{number}", "x" * MAX_SECRET_BYTES, clock)
    with pytest.raises(InvalidRecord, match="more than 65536 bytes"):
        await vault.put("chat", "KEY", "x", clock)
    for number in range(MAX_SECRETS):
        await vault.put("other", f"KEY_{number}", "x", clock)
    with pytest.raises(InvalidRecord, match="more than 64 secrets"):
        await vault.put("other", "KEY", "x", clock)
    assert len((await state.function_secrets("other")).secrets) == MAX_SECRETS


@pytest.mark.parametrize(
    "key",
    ["", "a", "1A", "A-B", "A\n", "A" * 129, "PATH", "LD_PRELOAD", "PYTHONPATH", "HYPERCAST_URL", "HOME"],
)
def test_names_that_steer_a_process_are_refused(key: str) -> None:
    with pytest.raises(InvalidRecord):
        check_secret_key(key)


async def test_no_repr_shows_a_value_or_a_ciphertext() -> None:
    state = MemoryState()
    vault = SecretVault(state, OLD)
    await vault.put("chat", "TOKEN", "hunter2", FakeClock())
    known = await state.function_secrets("chat")
    assert "sealed" not in repr(known) and "first cluster" not in repr(vault)
    assert all(b"hunter2" not in secret.sealed for secret in known.secrets)
    assert dataclasses.asdict(known.secrets[0])["nbytes"] == 7


def test_function_yaml_names_secrets() -> None:
    spec = parse_function_yaml("handler: handler.py:handle\nsecrets: [TOKEN, API_KEY]\n")
    assert spec.handler is not None and spec.handler.secrets == ("API_KEY", "TOKEN")
    for text, message in (
        ("handler: h.py:f\nsecrets: [a]\n", "secrets: 'a' is no name"),
        ("handler: h.py:f\nsecrets: [[1]]\n", "secrets: .* is no name"),
        ("handler: h.py:f\nsecrets: [LD_PRELOAD]\n", "secrets: LD_PRELOAD: reserved"),
        ("handler: h.py:f\nsecrets: [A, A]\n", "given twice"),
        ("handler: h.py:f\nsecrets: [A]\nenv: {A: b}\n", "env.A: is also among the secrets"),
        ("handler: h.py:f\nsecrets: {A: b}\n", "secrets: must be"),
        ("model: ./m\nsecrets: [A]\n", "secrets: only a function with a handler"),
        (f"handler: h.py:f\nsecrets: {[f'A{n}' for n in range(65)]}\n", "at most 64"),
    ):
        with pytest.raises(InvalidRecord, match=message):
            parse_function_yaml(text)
