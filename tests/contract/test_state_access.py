"""Owners, sharing and roles in both states, and what a release from before them makes of their records."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec
import pytest

from registry import keys
from registry.codec import decode, decode_change, encode, encode_marked
from registry.config.secrets import new_api_key
from registry.errors import Conflict, NewerSchema, NotFound
from registry.records.api_key import ApiKey, KeyRole
from registry.records.change import FunctionChanged
from registry.records.function import OPEN_ACCESS, Access, Function, FunctionVersion, Scaling
from registry.records.schema import BASE_SCHEMA, SCHEMA, TENANCY_SCHEMA
from registry.redis.connections import ConnectionPool
from registry.redis.state import RedisState
from registry.state import ClusterConfig, State
from tests.fixtures.registry_records import draft
from tests.fixtures.state import after

ACME = Access(owner="acme", private=True)
CLUSTER = ClusterConfig(cluster_id="c1", store_url="file:///s")


def owned(access: Access | None) -> Access:
    """Let acme alone deploy."""
    if access is not None and access.owner != "acme":
        raise Conflict("taken")
    return access or ACME


async def test_access_is_stored_kept_and_in_the_feed(state: State) -> None:
    cursor = (await state.snapshot()).cursor
    await state.create_version(draft("open"), None)
    await state.create_version(draft(), None, owned)
    assert (await state.function("open")).access == OPEN_ACCESS
    assert (await state.function("tiny")).access == ACME
    await state.create_version(draft(image="d" * 64), None)
    await state.set_scaling("tiny", Scaling(keep_alive_s=3))
    await state.set_current("tiny", 1)
    shared = replace(ACME, shared_with=("globex",))
    head = await state.set_access("tiny", lambda known: replace(known, shared_with=("globex",)))
    assert head == await state.function("tiny") and head.access == shared
    assert {one.name: one.access for one in (await state.snapshot()).functions} == {
        "open": OPEN_ACCESS,
        "tiny": shared,
    }
    changes = await after(state, cursor, 6)
    assert [change.function.access for change in changes] == [  # type: ignore[union-attr]
        *(OPEN_ACCESS, ACME, ACME, ACME, ACME, shared)
    ]
    with pytest.raises(NotFound):
        await state.set_access("absent", lambda known: known)


async def test_a_step_that_refuses_changes_nothing(state: State) -> None:
    await state.create_version(draft(), None)
    before = await state.snapshot()
    with pytest.raises(Conflict):
        await state.create_version(draft(image="d" * 64), Scaling(keep_alive_s=3), owned)
    after_it = await state.snapshot()
    assert (after_it.functions, after_it.versions) == (before.functions, before.versions)


async def test_of_tenants_that_deploy_one_name_at_once_one_has_it(state: State) -> None:
    async def deploy(tenant: str) -> bool:
        def step(known: Access | None) -> Access:
            if known is not None and known.owner != tenant:
                raise Conflict("taken")
            return known or Access(owner=tenant, private=True)

        try:
            await state.create_version(draft(description=tenant), None, step)
        except Conflict:
            return False
        return True

    names = [f"t{number}" for number in range(10)]
    done = await asyncio.gather(*map(deploy, names))
    assert sum(done) == 1
    head, version = await state.function("tiny"), await state.version("tiny")
    assert head.access.owner == version.description == names[done.index(True)]
    assert head.versions == (1,)


async def test_only_new_content_raises_the_schema(state: State) -> None:
    await state.cluster_config(CLUSTER)
    for role in (KeyRole.ADMIN, KeyRole.CALLER):
        await state.put_key(new_api_key("acme", role, "").key)
    await state.create_version(draft(), None)
    await state.set_access("tiny", lambda known: OPEN_ACCESS)
    assert (await state.cluster_config()).schema == BASE_SCHEMA
    await state.set_access("tiny", lambda known: replace(known, private=True))
    assert (await state.cluster_config()).schema == TENANCY_SCHEMA
    await state.set_access("tiny", lambda known: OPEN_ACCESS)
    assert (await state.cluster_config(CLUSTER)).schema == TENANCY_SCHEMA  # what was written once


@pytest.mark.parametrize("role", [one for one in KeyRole if one not in (KeyRole.ADMIN, KeyRole.CALLER)])
async def test_a_new_role_raises_the_schema(state: State, role: KeyRole) -> None:
    await state.cluster_config(CLUSTER)
    key = new_api_key("acme", role, "").key
    await state.put_key(key)
    assert (await state.cluster_config()).schema == TENANCY_SCHEMA
    limited = replace(key, max_concurrent=2)
    await state.replace_key(key, limited)
    assert await state.keys() == [await state.key(key.id)] == [limited]


class EarlierRole(StrEnum):
    """The roles of the release before."""

    ADMIN = "admin"
    CALLER = "caller"


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierKey:
    """The parts of a key that the release before would decide by."""

    id: str
    tenant: str
    role: EarlierRole
    functions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierFunction:
    """The head of a function, as of the release before."""

    name: str
    current: int
    versions: tuple[int, ...]
    scaling: Mapping[str, Any]
    created_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierVersion:
    """The parts of a version that the release before would serve by."""

    function: str
    version: int
    image: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierChange:
    """A change of a function in the feed of the release before."""

    function: EarlierFunction
    version: EarlierVersion


async def raw_records(url: str) -> dict[str, bytes]:
    """Return what Redis holds: the function, its version, the change in the feed and the key."""
    pool = ConnectionPool(url)
    try:
        entries = await pool.call("XRANGE", keys.FEED, "-", "+")
        fields = entries[-1][1]
        return {
            "function": await pool.call("HGET", keys.FUNCTIONS, "tiny"),
            "version": await pool.call("HGET", keys.VERSIONS, "tiny:1"),
            "change": fields[b"FunctionChanged"] if isinstance(fields, dict) else fields[1],
            "key": (await pool.call("HVALS", keys.API_KEYS))[0],
        }
    finally:
        await pool.aclose()


EARLIER = {
    "function": EarlierFunction,
    "version": EarlierVersion,
    "change": EarlierChange,
    "key": EarlierKey,
}


@pytest.mark.parametrize("new", [False, True], ids=["no new content", "new content"])
async def test_what_the_release_before_reads(redis_url: str, new: bool) -> None:
    """It reads all that has no new content, and refuses the rest, rather than leave out an owner."""
    pool = ConnectionPool(redis_url)
    await pool.call("FLUSHALL")
    await pool.aclose()
    async with RedisState.connect(redis_url) as state:
        await state.cluster_config(CLUSTER)
        await state.create_version(draft(), None, owned if new else lambda known: known or OPEN_ACCESS)
        key = new_api_key("acme", KeyRole.DEPLOYER if new else KeyRole.CALLER, "", functions=["tiny"]).key
        await state.put_key(key)
        config = await state.cluster_config()
    assert config.schema == (TENANCY_SCHEMA if new else BASE_SCHEMA)
    for name, raw in (await raw_records(redis_url)).items():
        if not new:
            msgspec.json.decode(raw, type=EARLIER[name])
            continue
        with pytest.raises(msgspec.ValidationError, match="Expected `object`, got `array`"):
            msgspec.json.decode(raw, type=EARLIER[name])


def test_marked_records_are_read_by_this_release_and_later_ones_refused() -> None:
    head = Function(name="f", current=1, versions=(1,), access=ACME)
    version = draft("f", version=1)
    change = FunctionChanged(function=head, version=version)
    key = new_api_key("acme", KeyRole.VIEWER, "").key
    assert (head.schema, change.schema, key.schema) == (TENANCY_SCHEMA,) * 3
    records: tuple[tuple[type, object], ...] = (
        *((Function, head), (FunctionVersion, version), (FunctionChanged, change), (ApiKey, key)),
    )
    for kind, record in records:
        assert encode_marked(record, BASE_SCHEMA) == encode(record)
        raw = encode_marked(record, TENANCY_SCHEMA)
        assert decode(kind, raw, "k") == decode(kind, raw.decode(), "k") == record
        with pytest.raises(NewerSchema, match=f"schema {SCHEMA + 1}.*reads {SCHEMA} at most"):
            decode(kind, encode_marked(record, SCHEMA + 1), "k")
    assert decode_change(b"FunctionChanged", encode_marked(change, SCHEMA), "k") == change
    with pytest.raises(NewerSchema, match="upgrade this process"):
        replace(CLUSTER, schema=SCHEMA + 1).check_readable()
