"""Functions and their versions in Redis, changed by compare-and-set on the function's head."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from registry import keys
from registry.codec import decode, encode, encode_marked
from registry.errors import InvalidRecord
from registry.records.change import FunctionChanged, FunctionDeleted
from registry.records.function import Access, Function, FunctionVersion, Scaling
from registry.records.function_changes import (
    AccessStep,
    KnownFunction,
    keep_access,
    no_function,
    no_version,
    plan_current,
    plan_version,
    reserved,
)
from registry.records.rollout_changes import RolloutStep
from registry.records.secret import FunctionSecrets
from registry.redis.connections import LuaScript
from registry.redis.store import RedisStore, change_script, feed_entry, ordered

# Replace a function's head (and versions) if head and last number are still those that the caller read, as
# the fence against a concurrent writer. An empty head or version deletes.
# KEYS feed functions versions last-versions secrets
# ARGV length name old-head old-last new-head new-last kind change unreserved (version-field version)*
# With "unreserved", -1 for a new name that has secrets.
_SWAP = change_script(
    """
if (redis.call('HGET', KEYS[2], ARGV[2]) or '') ~= ARGV[3] then return 0 end
if (redis.call('HGET', KEYS[4], ARGV[2]) or '0') ~= ARGV[4] then return 0 end
if ARGV[9] ~= '' and ARGV[3] == '' and redis.call('HEXISTS', KEYS[5], ARGV[2]) == 1 then return -1 end
if ARGV[5] == '' then
  redis.call('HDEL', KEYS[2], ARGV[2])
  redis.call('HDEL', KEYS[5], ARGV[2])
else
  redis.call('HSET', KEYS[2], ARGV[2], ARGV[5])
end
redis.call('HSET', KEYS[4], ARGV[2], ARGV[6])
for i = 10, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[3], ARGV[i])
  else
    redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1])
  end
end
publish(ARGV[7], ARGV[8])
return 1
""",
    when_full=False,
)


# Replace a function's secrets if they are still those that were read; "" is none. Returns 0 if not.
# KEYS secrets; ARGV name before after
_REPLACE_SECRETS = LuaScript("""
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
return 1
""")


class RedisFunctions(RedisStore):
    """Functions, their versions and secrets."""

    async def create_version(
        self,
        draft: FunctionVersion,
        scaling: Scaling | None,
        access: AccessStep = keep_access,
        *,
        unreserved: bool = False,
        becomes_current: bool = True,
    ) -> FunctionVersion:
        name = draft.function
        while True:
            raw, known = await self._known(name)
            planned = plan_version(known, draft, scaling, access, becomes_current=becomes_current)
            if planned.head == known.head:
                return planned.result
            change = FunctionChanged(function=planned.head, version=planned.result)
            encoded = encode_marked(planned.result, change.schema)
            new = {planned.result.version: encoded} if planned.is_new else {}
            if await self._swap(name, raw, known.last, planned.head, change, new, unreserved=unreserved):
                return planned.result

    async def function(self, name: str) -> Function:
        raw = await self._redis.call("HGET", keys.FUNCTIONS, name)
        if raw is None:
            raise no_function(name)
        return decode(Function, raw, f"{keys.FUNCTIONS}[{name}]")

    async def functions(self) -> list[Function]:
        raws = await self._redis.call("HVALS", keys.FUNCTIONS)
        return [*ordered((decode(Function, raw, keys.FUNCTIONS) for raw in raws), "name")]

    async def version(self, name: str, version: int | None = None) -> FunctionVersion:
        if version is None:
            known = (await self._known(name))[1]
            if known.current is None:
                raise no_function(name)
            return known.current
        found = await self._version(name, version)
        if found is None:
            await self.function(name)  # raises if the function itself is missing
            raise no_version(name, version)
        return found

    async def versions(self, name: str | None = None) -> list[FunctionVersion]:
        if name is not None:
            await self.function(name)
        raws = await self._redis.call("HVALS", keys.VERSIONS)
        versions = ordered(
            (decode(FunctionVersion, raw, keys.VERSIONS) for raw in raws), "function", "version"
        )
        return [version for version in versions if name in (None, version.function)]

    async def set_current(self, name: str, version: int, *, at: float = 0.0) -> Function:
        return await self._update(name, lambda head: plan_current(head, version, at=at))

    async def set_scaling(self, name: str, scaling: Scaling) -> Function:
        return await self._update(name, lambda head: replace(head, scaling=scaling))

    async def set_access(self, name: str, step: Callable[[Access], Access]) -> Function:
        return await self._update(name, lambda head: replace(head, access=step(head.access)))

    async def change_rollout(self, name: str, step: RolloutStep) -> Function:
        return await self._update(name, step)

    async def delete_function(self, name: str) -> None:
        attempted = False
        while True:
            raw, known = await self._known(name)
            if known.head is None:
                if attempted:  # deleted, by this call or another one
                    return
                raise no_function(name)
            gone = dict.fromkeys(known.head.versions, b"")
            if await self._swap(name, raw, known.last, None, FunctionDeleted(name=name), gone):
                return
            attempted = True

    async def function_secrets(self, function: str) -> FunctionSecrets:
        return (await self._secrets(function))[1]

    async def functions_with_secrets(self) -> list[str]:
        return sorted(name.decode() for name in await self._redis.call("HKEYS", keys.SECRETS))

    async def replace_secrets(self, before: FunctionSecrets, after: FunctionSecrets) -> bool:
        name = before.function
        raw, known = await self._secrets(name)
        if known != before:
            return known == after  # a repetition
        new = encode(after) if after.secrets else b""
        return bool(await self._redis.script(_REPLACE_SECRETS, [keys.SECRETS], [name, raw, new]))

    async def _secrets(self, name: str) -> tuple[bytes, FunctionSecrets]:
        raw = await self._redis.call("HGET", keys.SECRETS, name)
        if raw is None:
            return b"", FunctionSecrets(function=name)
        return raw, decode(FunctionSecrets, raw, f"{keys.SECRETS}[{name}]")

    async def _update(self, name: str, step: Callable[[Function], Function]) -> Function:
        while True:
            raw, known = await self._known(name)
            if known.head is None:
                raise no_function(name)
            head = step(known.head)
            if head == known.head:
                return head
            current = await self._version(name, head.current)
            if current is None:  # deleted concurrently: the next read shows it
                continue
            change = FunctionChanged(function=head, version=current)
            if await self._swap(name, raw, known.last, head, change, {}):
                return head

    async def _known(self, name: str) -> tuple[bytes, KnownFunction]:
        """Return the function's head as stored in Redis, and the decoded function."""
        before = b""
        while True:
            raw, last = await self._redis.run(
                ("HGET", keys.FUNCTIONS, name), ("HGET", keys.LAST_VERSIONS, name)
            )
            if raw is None:
                return b"", KnownFunction(last=int(last or 0))
            head = decode(Function, raw, f"{keys.FUNCTIONS}[{name}]")
            current = await self._version(name, head.current)
            if current is not None:
                return raw, KnownFunction(head=head, current=current, last=int(last))
            if raw == before:  # not deleted between the two reads, but inconsistent
                raise InvalidRecord(f"{keys.VERSIONS} lacks {keys.version(name, head.current)}")
            before = raw

    async def _version(self, name: str, number: int) -> FunctionVersion | None:
        field = keys.version(name, number)
        raw = await self._redis.call("HGET", keys.VERSIONS, field)
        return None if raw is None else decode(FunctionVersion, raw, f"{keys.VERSIONS}[{field}]")

    async def _swap(
        self,
        name: str,
        old: bytes,
        last: int,
        new: Function | None,
        change: FunctionChanged | FunctionDeleted,
        versions: Mapping[int, bytes],
        *,
        unreserved: bool = False,
    ) -> bool:
        fields = [part for number, raw in versions.items() for part in (keys.version(name, number), raw)]
        head, highest = b"", max(last, *versions) if versions else last
        if new is not None and isinstance(change, FunctionChanged):
            await self._raise_schema(change.schema)
            head = encode_marked(new, new.schema)
        found = [keys.FUNCTIONS, keys.VERSIONS, keys.LAST_VERSIONS, keys.SECRETS]
        entry, flag = feed_entry(change), b"1" if unreserved else b""
        done = await self._change(_SWAP, found, name, old, last, head, highest, *entry, flag, *fields)
        if done == -1:
            raise reserved(name)
        return bool(done)
