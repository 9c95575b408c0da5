"""Secrets in every State: changed by compare-and-set, deleted with their function."""

from dataclasses import replace

import pytest

from registry.errors import Conflict
from registry.records.schema import BASE_SCHEMA, TENANCY_SCHEMA
from registry.records.secret import FunctionSecrets, SealedSecret
from registry.state import ClusterConfig, State
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


async def test_a_new_name_with_secrets_is_reserved(state: State) -> None:
    known = await state.function_secrets("tiny")
    assert await state.replace_secrets(known, known.put(TOKEN))
    with pytest.raises(Conflict, match="has secrets"):
        await state.create_version(draft(), None, unreserved=True)
    assert (await state.create_version(draft(), None)).version == 1
    assert (await state.create_version(draft(dtype="float16"), None, unreserved=True)).version == 2


async def test_a_version_with_secrets_raises_the_schema(state: State) -> None:
    await state.cluster_config(ClusterConfig(cluster_id="c", store_url="/store"))
    await state.create_version(draft(), None)
    assert (await state.cluster_config()).schema == BASE_SCHEMA
    await state.create_version(draft(secrets=("K",)), None)
    assert (await state.cluster_config()).schema == TENANCY_SCHEMA
    assert (await state.version("tiny")).secrets == ("K",)
