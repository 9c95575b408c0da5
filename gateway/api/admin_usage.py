"""/admin/usage: the bill and the accelerators' time. Callers see their own tenant's."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway import exchange as exchanges
from gateway.auth import admits
from gateway.errors import Forbidden
from gateway.parameters import (
    FORMAT,
    GPU_BY,
    GROUP_BY,
    OF_FUNCTION,
    OF_KEY,
    OF_TENANT,
    RESOLUTION,
    SINCE,
    UNTIL,
)
from gateway.readings import Readings
from gateway.responses import encoded
from gateway.services import Services
from registry import gpu_report, usage_groups, usage_reader
from registry.api_key import Role
from registry.conservation import Verdict
from registry.errors import NotFound
from registry.state import UsageFilter
from registry.tables import to_csv, to_parquet
from registry.usage_report import COLUMNS, bounded, parse_by, split_days

_MEDIA = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}

Row = Mapping[str, Any]


class UsageRoutes:
    """Reports from the ledger. Those that read many records take turns."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._readings = Readings()

    async def report(self, request: Request) -> Response:
        """Sums by function and tenant, or other properties, over `[since, until)` in Unix seconds."""
        where, state = bounded(_where(request)), self._services.state
        by = parse_by(GROUP_BY.read(request) or ",".join(usage_groups.DEFAULT_BY), usage_groups.PROPERTIES)
        key = OF_KEY.read(request)
        columns = (*by, *COLUMNS)
        if by == usage_groups.DEFAULT_BY and key is None:
            if split_days(where.since, where.until).edges:
                async with self._turn(request):
                    sums = await state.report(where)
            else:
                sums = await state.report(where)
            rows = [msgspec.to_builtins(row) for row in sums]
        else:
            async with self._turn(request):
                found = await usage_reader.grouped(state, where, by, key=key)
            rows = [dict(zip(by, row.group, strict=True)) | _fields(row, COLUMNS) for row in found]
        return await _answer(request, rows, columns)

    async def summary(self, request: Request) -> Response:
        """Requests by status, time and cost of a period, by function and tenant."""
        where = _where(request)
        async with self._turn(request):
            rows = await usage_reader.summary(self._services.state, where)
        return encoded({"rows": rows})

    async def gpu_time(self, request: Request) -> Response:
        """Accelerator time over `[since, until)`, by function, tenant and node, and by time."""
        where, by = _where(request), GPU_BY.read(request)
        grouped_by = gpu_report.PROPERTIES if by is None else parse_by(by, gpu_report.PROPERTIES)
        step_s = gpu_report.RESOLUTIONS_S.get(RESOLUTION.read(request) or "", 0)
        async with self._turn(request):
            found = await usage_reader.gpu_time(self._services.state, where, grouped_by, step_s=step_s)
        columns = [
            name for name in gpu_report.COLUMNS if name in grouped_by or name not in gpu_report.PROPERTIES
        ]
        rows = [{"from": row.from_at, "to": row.to_at} | _fields(row, columns[2:]) for row in found]
        return await _answer(request, rows, columns)

    async def check(self, request: Request) -> Response:
        """Whether busy time is what records and lost calls tell, for every instance of `[since, until)`."""
        if exchanges.of(request.scope).caller.role is not Role.ADMIN:
            raise Forbidden("this needs an admin key")
        async with self._turn(request):
            found = await usage_reader.balance(
                self._services.state, self._live, since=SINCE.read(request), until=UNTIL.read(request)
            )
        instances = [
            msgspec.to_builtins(one) | {"missing_us": one.missing_us}
            for one in found.instances
            if one.verdict is not Verdict.EXACT
        ]
        return encoded(
            {
                "verdict": found.verdict,
                "requests": found.requests,
                "instances_checked": len(found.instances),
                "nodes_checked": len(found.nodes),
                "instances": instances,
                "nodes": [one for one in found.nodes if one.verdict is not Verdict.EXACT],
            }
        )

    async def show(self, request: Request) -> Response:
        """One request's record."""
        request_id = request.path_params["request_id"]
        record = await self._services.state.request(request_id)
        if not admits(exchanges.of(request.scope).caller, record.tenant):
            # Another tenant's record looks as if it were not there.
            raise NotFound(f"no request {request_id}")
        return encoded(record)

    def _turn(self, request: Request) -> AbstractAsyncContextManager[None]:
        return self._readings.turn(exchanges.of(request.scope).caller.tenant, request.receive)

    def _live(self) -> dict[str, str]:
        return {one.instance_id: one.node for one in self._services.cluster.view().instances}


def _where(request: Request) -> UsageFilter:
    """The filter that a request asks for, and may. Raises Forbidden, Unprocessable."""
    key = exchanges.of(request.scope).caller
    tenant = OF_TENANT.read(request)
    if key.role is not Role.ADMIN:
        if tenant not in (None, key.tenant):
            raise Forbidden("this key sees the usage of its own tenant only")
        tenant = key.tenant
    return UsageFilter(
        since=SINCE.read(request),
        until=UNTIL.read(request),
        function=OF_FUNCTION.read(request),
        tenant=tenant,
    )


def _fields(row: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


async def _answer(request: Request, rows: Sequence[Row], columns: Sequence[str]) -> Response:
    """The rows in the form that the query or the Accept header names."""
    form = FORMAT.read(request) or _accepted(request.headers.get("accept", ""))
    if form == "json":
        return encoded({"rows": rows})
    encode = to_csv if form == "csv" else to_parquet
    body = await asyncio.to_thread(encode, rows, columns)
    return Response(body, media_type=_MEDIA[form])


def _accepted(accept: str) -> str:
    """The first of our forms that the header names; JSON if it names none."""
    for part in accept.lower().split(","):
        media = part.partition(";")[0].strip()
        for form, known in _MEDIA.items():
            if media == known.partition(";")[0]:
                return form
    return "json"
