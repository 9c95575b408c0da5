"""Deletion of a tenant: its requests lose its name, key ids and client ids; all sums stay as they are."""

import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec

from registry.accounting.row_order import START, LedgerKind, position_of
from registry.archive.files import ArchiveFiles
from registry.archive.lease import archive_lease
from registry.clock import Clock
from registry.errors import InvalidRecord
from registry.held_lease import HeldLease
from registry.records.archive import ArchiveFile
from registry.records.usage import RequestRecord
from registry.redis.state import RedisState
from registry.state import UsageFilter

_PAGE = 1000
_AT_ONCE = 100
ALIAS = "deleted-"


@dataclass(frozen=True, slots=True)
class ErasureStep:
    """Requests that were changed, and the alias that they have now."""

    requests: int
    alias: str


class TenantEraser:
    """Replaces a tenant by a random alias in Redis and archive. It may be repeated after a failure."""

    def __init__(self, state: RedisState, files: ArchiveFiles, clock: Clock) -> None:
        self._state = state
        self._files = files
        self._clock = clock

    async def erase(self, tenant: str) -> AsyncGenerator[ErasureStep, None]:
        """Replace the tenant; yield progress.

        Raises InvalidRecord while a key of the tenant is valid, Conflict where the archive is being written.
        """
        if tenant.startswith(ALIAS):
            raise InvalidRecord(f"{tenant} is the alias of a deleted tenant")
        keys = [key.id for key in await self._state.keys() if key.tenant == tenant and key.revoked_at is None]
        if keys:
            raise InvalidRecord(f"tenant {tenant!r} has keys: revoke {', '.join(keys[:5])} first")
        async with archive_lease(self._state, self._clock) as lease:
            alias = await self._state.tenant_alias(tenant, f"{ALIAS}{secrets.token_hex(6)}")
            # Without new rows below it, since the requests in Redis are replaced where they are.
            await self._state.close_requests(lease.epoch, (await self._state.archive_index()).closed)
            async for count in self._in_redis(lease, tenant, alias):
                yield ErasureStep(count, alias)
            for file in (await self._state.archive_index()).files:
                if file.kind == LedgerKind.REQUESTS and (count := await self._count(file, tenant)):
                    await self._in_file(lease, file, tenant, alias)
                    yield ErasureStep(count, alias)
            await self._state.rename_tenant_sums(lease.epoch, tenant, alias)
            await self._state.forget_alias(tenant)

    async def _in_redis(self, lease: HeldLease, tenant: str, alias: str) -> AsyncGenerator[int, None]:
        after, more = START, True
        while more:
            await lease.renew()
            page = await self._state.row_page(LedgerKind.REQUESTS, after, count=_PAGE)
            more = page.more
            changes = [
                (row, _anonymous(row, alias))
                for row in page.rows
                if isinstance(row, RequestRecord) and row.tenant == tenant
            ]
            for start in range(0, len(changes), _AT_ONCE):
                some = changes[start : start + _AT_ONCE]
                yield await self._state.replace_requests(lease.epoch, some)
            if page.rows:
                after = position_of(page.rows[-1])

    async def _count(self, file: ArchiveFile, tenant: str) -> int:
        tallies = self._files.tally([file], UsageFilter(tenant=tenant), (), counts=True)
        return sum([amounts[0] async for some in tallies for _, amounts in some])

    async def _in_file(self, lease: HeldLease, file: ArchiveFile, tenant: str, alias: str) -> None:
        def change(table: Any) -> Any:
            from registry.archive.columns import replaced  # pyarrow: 40 MB

            # The tenant last, since it selects the rows.
            values = {"key_id": alias, "client_request_id": "", "tenant": alias}
            return replaced(table, ("tenant", tenant), values)

        after = await self._files.rewrite(file, change)
        await lease.renew()
        await self._state.publish_file(lease.epoch, after, replaces=file.digest)
        await self._files.delete(file)


def _anonymous(record: RequestRecord, alias: str) -> RequestRecord:
    return msgspec.structs.replace(record, tenant=alias, key_id=alias, client_request_id="")
