"""What the gateway notes of one HTTP request while it lasts."""

from dataclasses import dataclass

from starlette.types import Scope

from registry.api_key import ApiKey
from registry.function import FunctionVersion
from registry.quota import Place

_KEY = "hypercast"


@dataclass(slots=True)
class Exchange:
    """One request. The middleware makes it; the handlers fill in what they learn, for headers, log and
    metrics. `received_at` is Unix time, `received_s` the monotonic clock's."""

    request_id: str
    received_at: float
    received_s: float
    key: ApiKey | None = None
    function: str = ""
    version: int = 0
    start_kind: str = ""
    node: str = ""
    error_code: str = ""
    place: Place | None = None  # of a key with limits
    rate_headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def caller(self) -> ApiKey:
        """The key that the request came with (the middleware lets none through without)."""
        assert self.key is not None
        return self.key

    def concerns(self, version: FunctionVersion) -> None:
        self.function, self.version = version.function, version.version


def put(scope: Scope, exchange: Exchange) -> None:
    scope[_KEY] = exchange


def of(scope: Scope) -> Exchange:
    """The exchange of this request."""
    exchange = scope[_KEY]
    assert isinstance(exchange, Exchange)
    return exchange
