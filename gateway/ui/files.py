"""The console's files, read once, and responses with them."""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response

PAGE = "index.html"

_FOLDERS = ("static", "vendor")
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Nothing but this gateway: no inline code or style, no other host, no frame around it, and no string becomes
# markup or code.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # a browser asks each time, and is answered 304
    "vary": "accept-encoding",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UiFile:
    """A file as it is sent: `packed` is its body with gzip."""

    body: bytes
    packed: bytes
    media_type: str
    etag: str


@cache
def ui_files() -> Mapping[str, UiFile]:
    """Return the console's files by name. Licences and other texts beside them are not served."""
    here = Path(__file__).parent
    found = {
        path.name: _read(path)
        for folder in _FOLDERS
        for path in sorted((here / folder).iterdir())
        if path.suffix in _MEDIA_TYPES
    }
    return MappingProxyType(found)


def _read(path: Path) -> UiFile:
    body = path.read_bytes()
    return UiFile(
        body=body,
        packed=gzip.compress(body, mtime=0),
        media_type=_MEDIA_TYPES[path.suffix],
        etag=f'"{hashlib.sha256(body).hexdigest()[:16]}"',
    )


def file_response(file: UiFile, request: Request) -> Response:
    """Return a response with the file, packed where the browser takes that; 304 where it has the file."""
    headers = {**_HEADERS, "etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(file.packed, headers=headers, media_type=file.media_type)
    return Response(file.body, headers=headers, media_type=file.media_type)
