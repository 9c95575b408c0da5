"""The context of one HTTP request: id, key and what headers, access log and metrics report about it."""

import msgspec
from starlette.types import Scope

from gateway.core.contract import CallUsage
from gateway.core.request_trace import RequestTrace
from registry.records.api_key import ApiKey
from registry.records.function import FunctionVersion
from registry.records.quota import ConcurrencyLease
from registry.records.usage import RequestRecord

_KEY = "hypercast"


class DeferredBill(msgspec.Struct):
    """The bill of a job: written by what runs the job, once the result is stored. None: nothing was used."""

    record: RequestRecord | None = None
    uses: tuple[CallUsage, ...] = ()


class RequestContext(msgspec.Struct):
    """One HTTP request, created by the middleware and completed by the handlers.

    `received_at` is Unix time, `received_s` is monotonic. The request of a job has an `attempt` and a `bill`;
    it runs in the background.
    """

    request_id: str
    received_at: float
    received_s: float
    client_request_id: str = ""  # the client's `x-request-id`; it may repeat one
    key: ApiKey | None = None
    function: str = ""
    version: int = 0
    start_kind: str = ""
    node: str = ""
    error_code: str = ""
    trace_id: str = ""  # for the log; of its caller, if it is not traced here
    trace: RequestTrace | None = None
    lease: ConcurrencyLease | None = None  # of a key with limits
    attempt: int = 0
    bill: DeferredBill | None = None
    shadow_version: int = 0  # of the same function: a copy of the request goes there, too
    pinned_version: int = 0  # of such a copy: what it goes to
    rate_headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def response_id(self) -> str:
        """The response's `x-request-id`: the client's own, else the gateway's."""
        return self.client_request_id or self.request_id

    @property
    def caller(self) -> ApiKey:
        """The key that authenticated the request; the middleware rejects requests without one."""
        assert self.key is not None
        return self.key

    def set_version(self, version: FunctionVersion) -> None:
        self.function, self.version = version.function, version.version


def attach(scope: Scope, context: RequestContext) -> None:
    """Store the context in the ASGI scope."""
    scope[_KEY] = context


def request_context(scope: Scope) -> RequestContext:
    """Return the context of the request with this ASGI scope."""
    context = scope[_KEY]
    assert isinstance(context, RequestContext)
    return context
