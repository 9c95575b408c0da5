"""Exceptions of the HTTP side, and the translation of every failure to the error envelope.

ApiError
├── Unprocessable    422 (below /v1/ and /v2 400): a field is missing, of the wrong type or out of its bounds
├── BadRequest       400: well-formed, but it cannot be carried out
├── Unauthorized     401
├── Forbidden        403
├── ModelNotFound    404
├── Conflicting      409: the present state does not allow it
├── TooMany          429, with Retry-After
└── Unavailable      503, with Retry-After
"""

import msgspec
from starlette.exceptions import HTTPException

from gateway.core.contract import DispatchError
from gateway.core.validation import validation_message
from registry.errors import (
    CheckpointError,
    Conflict,
    CorruptImage,
    InvalidRecord,
    NotFound,
    RegistryError,
    StateUnavailable,
    StoreFull,
)

RETRY_AFTER_MAX_S = 120
PROTOCOL_PATHS = ("/v1/", "/v2/")  # of protocols in which an invalid value is a 400

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
}


class ApiError(Exception):
    """A failure that is sent to the client as the error envelope."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = headers

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def envelope(self) -> bytes:
        """Return the body: `{"error": {"message", "type", "param", "code"}}`."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def all_headers(self) -> list[tuple[str, str]]:
        """Return the headers of the response, with Retry-After where it is set."""
        headers = list(self.headers)
        if self.retry_after_s is not None:
            headers.append(("retry-after", str(min(self.retry_after_s, RETRY_AFTER_MAX_S))))
        return headers


class Unprocessable(ApiError):
    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(422, "invalid_value", message, param=param)


class BadRequest(ApiError):
    def __init__(self, message: str, *, param: str | None = None, code: str = "bad_request") -> None:
        super().__init__(400, code, message, param=param)


class Conflicting(ApiError):
    def __init__(self, message: str) -> None:
        super().__init__(409, "conflict", message)


class TooMany(ApiError):
    """A 429: a rate, concurrency or spend limit of the caller's key."""

    def __init__(
        self, message: str, *, code: str, retry_after_s: int | None, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(429, code, message, retry_after_s=retry_after_s, headers=headers)


class Unauthorized(ApiError):
    def __init__(self, message: str, *, code: str = "invalid_api_key") -> None:
        super().__init__(401, code, message, headers=(("www-authenticate", "Bearer"),))


class Forbidden(ApiError):
    def __init__(self, message: str) -> None:
        super().__init__(403, "forbidden", message)


class ModelNotFound(ApiError):
    def __init__(self, name: str) -> None:
        super().__init__(404, "model_not_found", f"there is no function {name!r}", param="model")


class Unavailable(ApiError):
    def __init__(self, message: str, *, code: str = "overloaded", retry_after_s: int = 5) -> None:
        super().__init__(503, code, message, retry_after_s=retry_after_s)


def from_validation(error: msgspec.ValidationError, *, prefix: str = "") -> Unprocessable:
    """Return a schema violation, with the path of the field as `param`."""
    message, path = validation_message(error, prefix)
    return Unprocessable(message, param=path or None)


def translate(error: Exception, path: str = "") -> ApiError | None:
    """Return the ApiError for a known failure of a request to `path`, None for an internal fault.

    Below /v1/ and /v2/ an invalid value is a 400, as OpenAI, Anthropic, vLLM and Triton send it.
    """
    known = _translate(error)
    if isinstance(known, Unprocessable) and path.startswith(PROTOCOL_PATHS):
        return BadRequest(known.message, param=known.param, code=known.code)
    return known


def _translate(error: Exception) -> ApiError | None:
    match error:
        case ApiError():
            return error
        case DispatchError():
            return ApiError(
                error.status,
                error.code,
                str(error),
                retry_after_s=error.retry_after_s if error.status in (429, 503) else None,
            )
        case HTTPException():
            code = _CODES.get(error.status_code, "http_error")
            headers = tuple((error.headers or {}).items())
            return ApiError(error.status_code, code, error.detail, headers=headers)
        case msgspec.ValidationError():
            return from_validation(error)
        case RegistryError():
            return _from_registry(error)
        case _:
            return None


def _from_registry(error: RegistryError) -> ApiError:
    match error:
        case InvalidRecord():
            return Unprocessable(str(error))
        case NotFound():
            return ApiError(404, "not_found", str(error))
        case Conflict():
            return ApiError(409, "conflict", str(error))
        case StateUnavailable():
            return Unavailable(f"Redis is unavailable ({error})", code="state_unavailable")
        case CheckpointError() | CorruptImage():
            return ApiError(422, "corrupt_image", str(error))
        case StoreFull():
            return ApiError(507, "store_full", str(error))
        case _:
            return ApiError(500, "internal", str(error))
