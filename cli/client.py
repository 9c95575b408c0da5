"""A client of the gateway's HTTP interface."""

import json
import ssl
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx2

from cli.errors import (
    AuthError,
    CliError,
    DeployError,
    ForbiddenError,
    MissingError,
    RoomError,
    TimeoutExceeded,
    UsageError,
)
from cli.settings import ClientSettings
from rdmacast.protocol.tls import TlsFiles, load_client

CONNECT_TIMEOUT_S = 10.0
_ERRORS: dict[int, tuple[type[CliError], str]] = {
    400: (UsageError, ""),
    401: (AuthError, " (set a key with `hypercast login`, --api-key or HYPERCAST_API_KEY)"),
    403: (ForbiddenError, " (the API key in use lacks this right)"),
    404: (MissingError, ""),
    413: (UsageError, ""),
    422: (UsageError, ""),
    504: (TimeoutExceeded, ""),
    507: (RoomError, ""),
}
_CODES: dict[str, type[CliError]] = {"unsupported_model": DeployError}

_NOT_REACHED = "Is it running (`hypercast up`)? Give its address: --url, HYPERCAST_URL or `hypercast login`."
_UNTRUSTED = "Name the authority of its certificate with --ca or HYPERCAST_CA_FILE."


class Client:
    """A synchronous HTTP client. Every failure is a CliError with its exit code."""

    def __init__(self, settings: ClientSettings, timeout_s: float = 600.0) -> None:
        self.url = settings.url
        headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._http = httpx2.Client(
            base_url=settings.url,
            headers=headers,
            trust_env=False,
            verify=_trust(settings),
        )
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long to wait for a response, or for its next piece."""
        self._http.timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def request(
        self, method: str, path: str, expect: Collection[int] = (), **options: Any
    ) -> httpx2.Response:
        """Return the response to one request. Raises CliError for every status from 400 on, but `expect`."""
        with self._translated():
            response = self._http.request(method, path, **options)
            if response.status_code not in expect:
                raise_for(response)
            return response

    def json(self, method: str, path: str, expect: Collection[int] = (), **options: Any) -> Any:
        """Return the JSON body of the response to one request."""
        response = self.request(method, path, expect, **options)
        try:
            return response.json()
        except ValueError as exc:
            raise CliError(f"{self.url} is not a Hypercast gateway (its response is not JSON)") from exc

    @contextmanager
    def stream(self, method: str, path: str, **options: Any) -> Iterator[httpx2.Response]:
        """Yield a streamed response. Raises CliError for every status from 400 on."""
        with self._translated(), self._http.stream(method, path, **options) as response:
            if response.status_code >= 400:
                response.read()
                raise_for(response)
            yield response

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except httpx2.TimeoutException as exc:
            raise TimeoutExceeded(f"{self.url} did not respond in time") from exc
        except httpx2.ConnectError as exc:
            is_untrusted = "CERTIFICATE_VERIFY_FAILED" in str(exc)
            advice = _UNTRUSTED if is_untrusted else _NOT_REACHED
            raise CliError(f"cannot reach {self.url}: {exc}. {advice}") from exc
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as exc:
            raise UsageError(f"bad address {self.url!r}: {exc}") from exc
        except httpx2.HTTPError as exc:
            raise CliError(f"{self.url}: {exc or type(exc).__name__}") from exc


def _trust(settings: ClientSettings) -> ssl.SSLContext | bool:
    """Return by what the gateway's certificate is verified: the CA file, else the system's authorities."""
    is_https = settings.url.lower().startswith("https://")
    if settings.ca_file is None:  # reading the system's authorities takes a tenth of a command's time
        return True if is_https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not is_https:
        raise UsageError(f"a CA file (--ca, HYPERCAST_CA_FILE) needs an https:// address, not {settings.url}")
    try:
        return load_client(TlsFiles(ca=settings.ca_file))
    except OSError as error:
        raise UsageError(f"--ca {settings.ca_file}: {error.strerror or error}") from error


def segment(name: str) -> str:
    """Return a name quoted as one segment of a path."""
    return quote(name, safe=":")


def raise_for(response: httpx2.Response) -> None:
    """Raise the CliError of an error response; return for any other."""
    if response.status_code < 400:
        return
    kind, hint = _ERRORS.get(response.status_code, (CliError, ""))
    raise _CODES.get(_of_error(response, "code"), kind)(error_message(response) + hint)


def error_message(response: httpx2.Response) -> str:
    """Return the message of an error response."""
    found = _of_error(response, "message")
    return found or f"HTTP {response.status_code}: {response.text[:500]}".removesuffix(": ")


def _of_error(response: httpx2.Response, field: str) -> str:
    try:
        return str(response.json()["error"][field])
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        return ""


def server_events(response: httpx2.Response) -> Iterator[tuple[str, str]]:
    """Yield server-sent events as (kind, text), where kind is `data` or `comment`."""
    for line in response.iter_lines():
        if line.startswith("data:"):
            yield "data", line[5:].strip()
        elif line.startswith(":"):
            yield "comment", line[1:].strip()
