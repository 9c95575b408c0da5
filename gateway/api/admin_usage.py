"""/admin/usage: reports from the ledger. Callers see their own tenant's."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.api.admin_cluster import LineReply
from gateway.core.errors import Forbidden
from gateway.core.request_context import request_context
from gateway.core.rights import Right, may
from gateway.http.bounded_reads import BoundedReads
from gateway.requests.services import Services
from gateway.schemas.answers import (
    GpuTimeReport,
    GpuTimeRow,
    InstanceAudit,
    UsageAudit,
    UsageReport,
    UsageSummary,
    UsageSums,
    view,
)
from gateway.schemas.parameters import (
    EXPORT_FORMAT,
    FORMAT,
    GPU_BY,
    GROUP_BY,
    OF_FUNCTION,
    OF_KEY,
    OF_TENANT,
    PROVIDER,
    RESOLUTION,
    SINCE,
    UNTIL,
)
from gateway.tenants.auth import may_see_tenant
from registry.accounting import gpu_report, usage_groups, usage_reader
from registry.accounting.ledger_pages import request_pages
from registry.accounting.reconciliation import BalanceVerdict
from registry.accounting.tables import to_csv, to_parquet
from registry.accounting.usage_report import COLUMNS, bounded, parse_by, split_days
from registry.errors import NotFound
from registry.exports.exporter import ExportContext, Exporter, ExportFormat, make_exporter
from registry.exports.focus import PROVIDER as DEFAULT_PROVIDER
from registry.records.usage import RequestRecord
from registry.state import Ledger, UsageFilter

_MEDIA = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}

Row = Mapping[str, Any]


class UsageRoutes:
    """The handlers of usage reports; those that read many records run one at a time."""

    def __init__(self, services: Services, archived: Ledger | None = None) -> None:
        self._services = services
        self._archived = archived
        self._reads = BoundedReads()

    @property
    def _ledger(self) -> Ledger:
        """The whole ledger, where this gateway has an archive."""
        return self._services.state if self._archived is None else self._archived

    async def report(self, request: Request) -> UsageReport | Response:
        """Sum requests over `[since, until)` (Unix seconds) by function and tenant, or other properties."""
        where, ledger = bounded(_where(request)), self._ledger
        by = parse_by(GROUP_BY.read(request) or ",".join(usage_groups.DEFAULT_BY), usage_groups.PROPERTIES)
        key = OF_KEY.read(request)
        columns = (*by, *COLUMNS)
        rows: Sequence[Row]
        if by == usage_groups.DEFAULT_BY and key is None:
            if split_days(where.since, where.until).edges:
                async with self._read_slot(request):
                    sums = await ledger.report(where)
            else:
                sums = await ledger.report(where)
            rows = [msgspec.to_builtins(row) for row in sums]
        else:
            async with self._read_slot(request):
                rows = await usage_reader.grouped(ledger, where, by, key=key)
        form = _format(request)
        if form != "json":
            return await _table(form, rows, columns)
        currency = self._services.health.currency
        return UsageReport(rows=[UsageSums(**row) for row in rows], currency=currency)

    async def summary(self, request: Request) -> UsageSummary:
        """Sum a period's requests by status, time and cost, for each function and tenant."""
        where = _where(request)
        async with self._read_slot(request):
            rows = await usage_reader.summary(self._ledger, where)
        return UsageSummary(rows=rows)

    async def gpu_time(self, request: Request) -> GpuTimeReport | Response:
        """Sum GPU time over `[since, until)` by function, tenant, node and time."""
        where, by = _where(request), GPU_BY.read(request)
        grouped_by = gpu_report.PROPERTIES if by is None else parse_by(by, gpu_report.PROPERTIES)
        step_s = gpu_report.RESOLUTIONS_S.get(RESOLUTION.read(request) or "", 0)
        async with self._read_slot(request):
            found = await usage_reader.gpu_time(self._ledger, where, grouped_by, step_s=step_s)
        columns = [
            name for name in gpu_report.COLUMNS if name in grouped_by or name not in gpu_report.PROPERTIES
        ]
        form = _format(request)
        if form != "json":
            rows = [{"from": row.from_at, "to": row.to_at} | _fields(row, columns[2:]) for row in found]
            return await _table(form, rows, columns)
        fields = ("from_at", "to_at", *columns[2:])
        return GpuTimeReport(rows=[GpuTimeRow(**_fields(row, fields)) for row in found])

    async def check(self, request: Request) -> UsageAudit:
        """Audit the ledger: compare metered GPU time with the usage of records, for each instance."""
        async with self._read_slot(request):
            found = await usage_reader.reconcile_ledger(
                self._ledger, self._live, since=SINCE.read(request), until=UNTIL.read(request)
            )
        instances = [
            view(InstanceAudit, one) for one in found.instances if one.verdict is not BalanceVerdict.EXACT
        ]
        return UsageAudit(
            verdict=found.verdict,
            requests=found.requests,
            instances_checked=len(found.instances),
            nodes_checked=len(found.nodes),
            instances=instances,
            nodes=[one for one in found.nodes if one.verdict is not BalanceVerdict.EXACT],
        )

    async def show(self, request: Request) -> RequestRecord:
        """Show one request's record, by its own id or the last one with this id of its client."""
        request_id = request.path_params["request_id"]
        found = await _visible(request, self._services.state, request_id)
        if found is None and self._archived is not None:
            async with self._read_slot(request):  # all files may have to be read
                found = await _visible(request, self._archived, request_id)
        if found is None:
            raise NotFound(f"no request {request_id}")
        return found

    async def export(self, request: Request) -> ASGIApp:
        """Send all requests as rows or events of another billing tool, as they are read.

        An error after the head cuts the response off: a row or event of it would be billed.
        """
        where, context = bounded(_where(request)), request_context(request.scope)
        form = ExportFormat(EXPORT_FORMAT.read(request) or ExportFormat.FOCUS)
        exporter = make_exporter(form, await self._export_context(form, PROVIDER.read(request)))
        media = _MEDIA["csv"] if form is ExportFormat.FOCUS else "application/x-ndjson"
        pieces = self._pieces(context.caller.tenant, exporter, where)
        return LineReply(self._services, context, media, pieces, cuts=True)

    async def _export_context(self, form: ExportFormat, provider: str | None) -> ExportContext:
        state, source, names = self._services.state, "", dict[str, str]()
        if form is ExportFormat.OPENMETER:
            source = f"urn:hypercast:{(await state.cluster_config()).cluster_id}"
        elif form is ExportFormat.FOCUS:
            names = {key.id: key.name for key in await state.keys()}
        return ExportContext(
            rates=await state.rates(),
            currency=self._services.health.currency,
            source=source,
            provider=" ".join((provider or "").split()) or DEFAULT_PROVIDER,
            key_names=names,
        )

    async def _pieces(
        self, tenant: str, exporter: Exporter, where: UsageFilter
    ) -> AsyncGenerator[bytes, None]:
        """Yield an export; other reads have their turn between two pages."""
        with self._reads.stream(tenant) as turn:
            pages = request_pages(self._ledger, where, max_records=None)
            first = True
            while True:
                async with turn:
                    page = await anext(pages, None)
                if first:  # after the first page, the errors of which have a status of their own
                    yield exporter.head()
                    first = False
                for piece in exporter.end() if page is None else exporter.add(page):
                    yield piece
                    await asyncio.sleep(0)
                if page is None:
                    return

    def _read_slot(self, request: Request) -> AbstractAsyncContextManager[None]:
        return self._reads.slot(request_context(request.scope).caller.tenant, request.scope)

    def _live(self) -> dict[str, str]:
        return {one.instance_id: one.node for one in self._services.cluster.view().instances}


async def _visible(request: Request, ledger: Ledger, request_id: str) -> RequestRecord | None:
    """Return a record that the caller may see: another tenant's must look absent."""
    caller = request_context(request.scope).caller
    found = await ledger.requests_by_id([request_id]) or await ledger.requests_by_client_id(request_id)
    visible = [record for record in found if may_see_tenant(caller, record.tenant)]
    return visible[-1] if visible else None


def _where(request: Request) -> UsageFilter:
    """Return the filter of a request. Raises Forbidden for another tenant, Unprocessable."""
    key = request_context(request.scope).caller
    tenant = OF_TENANT.read(request)
    if not may(key, Right.ALL_TENANTS):
        if tenant not in (None, key.tenant):
            raise Forbidden(
                f"this key may read the usage of its own tenant {key.tenant!r} only, not of {tenant!r}"
            )
        tenant = key.tenant
    return UsageFilter(
        since=SINCE.read(request),
        until=UNTIL.read(request),
        function=OF_FUNCTION.read(request),
        tenant=tenant,
    )


def _fields(row: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _format(request: Request) -> str:
    """Return the format that the query or the Accept header names."""
    return FORMAT.read(request) or _accepted(request.headers.get("accept", ""))


async def _table(form: str, rows: Sequence[Row], columns: Sequence[str]) -> Response:
    """Return the rows as CSV or Parquet."""
    encode = to_csv if form == "csv" else to_parquet
    body = await asyncio.to_thread(encode, rows, columns)
    return Response(body, media_type=_MEDIA[form])


def _accepted(accept: str) -> str:
    """Return the first supported format of the header; JSON if it has none."""
    for part in accept.lower().split(","):
        media = part.partition(";")[0].strip()
        for form, known in _MEDIA.items():
            if media == known.partition(";")[0]:
                return form
    return "json"
