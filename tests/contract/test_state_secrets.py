"""Secrets in every State: changed by compare-and-set, deleted with their function."""

from dataclasses import replace

from registry.records.secret import FunctionSecrets, SealedSecret
from registry.state import State
from tests.fixtures.registry_records import draft

TOKEN = SealedSecret(key="TOKEN", nbytes=6, set_at=1.5, sealed=b"\0\xff secret")


async def test_secrets_are_replaced_by_compare_and_set(state: State) -> None:
    none = await state.function_secrets("tiny")
    assert none == FunctionSecrets(function="tiny") and await state.functions_with_secrets() == []
    one = none.put(TOKEN)
    assert await state.replace_secrets(none, one)
    assert await state.function_secrets("tiny") == one and await state.functions_with_secrets() == ["tiny"]
    other = one.put(replace(TOKEN, key="OTHER"))
    assert not await state.replace_secrets(none, other)
    assert await state.replace_secrets(one, other)
    assert [secret.key for secret in (await state.function_secrets("tiny")).secrets] == ["OTHER", "TOKEN"]
    assert await state.replace_secrets(other, none) and await state.functions_with_secrets() == []


async def test_secrets_end_with_their_function(state: State) -> None:
    none = await state.function_secrets("tiny")
    await state.replace_secrets(none, none.put(TOKEN))
    await state.create_version(draft(), None)
    assert (await state.function_secrets("tiny")).get("TOKEN") == TOKEN
    await state.delete_function("tiny")
    assert await state.functions_with_secrets() == []
