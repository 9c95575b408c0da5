"""JSON responses."""

from collections.abc import Iterable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Headers = Iterable[tuple[bytes, bytes]]
JSON_TYPE = b"application/json"


class JsonReply(Response):
    """A response of encoded JSON, without the work of a general Starlette response."""

    def __init__(self, body: bytes, status: int, headers: Headers) -> None:
        self.body = body
        self.status_code = status
        self._given = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, bytes(self.body), self.status_code, self._given)


async def send_json(send: Send, body: bytes, status: int = 200, headers: Headers = ()) -> None:
    """Send encoded JSON as the whole response."""
    await send_body(send, body, status, headers)


async def send_body(
    send: Send, body: bytes, status: int = 200, headers: Headers = (), media_type: bytes = JSON_TYPE
) -> None:
    """Send the whole response."""
    length = (b"content-length", b"%d" % len(body))
    raw = [*headers, length, (b"content-type", media_type)]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def raw_json(body: bytes, *, status: int = 200, headers: Headers = ()) -> JsonReply:
    """Return encoded JSON as a response."""
    return JsonReply(body, status, headers)


def json_response(value: object, *, status: int = 200, headers: Headers = ()) -> JsonReply:
    """Return a struct or record as a JSON response."""
    return raw_json(msgspec.json.encode(value), status=status, headers=headers)
