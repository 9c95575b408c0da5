"""The form of an error's body, which depends on the protocol that a path belongs to."""

from enum import Enum

import msgspec

from gateway.core.errors import ApiError

# Anthropic's types of errors, where they are not those of OpenAI.
_ANTHROPIC_TYPES = {
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class ErrorForm(Enum):
    """The protocols whose errors differ."""

    OPENAI = "openai"  # {"error": {"message", "type", "param", "code"}}
    ANTHROPIC = "anthropic"  # {"type": "error", "error": {"type", "message"}, "request_id"}
    INFERENCE = "inference"  # {"error": MESSAGE}, of the Open Inference Protocol


def error_form(path: str) -> ErrorForm:
    """Return the form of the errors below a path."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return ErrorForm.ANTHROPIC
    if path == "/v2" or path.startswith("/v2/"):
        return ErrorForm.INFERENCE
    return ErrorForm.OPENAI


def error_body(error: ApiError, form: ErrorForm, request_id: str) -> bytes:
    """Return the body of an error's response."""
    match form:
        case ErrorForm.OPENAI:
            return error.envelope()
        case ErrorForm.INFERENCE:
            return msgspec.json.encode({"error": error.message})
        case ErrorForm.ANTHROPIC:
            return msgspec.json.encode(anthropic_error(error, request_id))


def anthropic_error(error: ApiError, request_id: str) -> dict[str, object]:
    """Return an error as Anthropic's object."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status == 500 else error.type)
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id,
    }
