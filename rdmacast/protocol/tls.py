"""TLS contexts, which read their files again when these change.

Between the processes of a cluster both ends present a certificate of the cluster's own authority. Names in
those certificates are not checked: every certificate of that authority is a process of the cluster.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdmacast.reloaded import Reloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files: a certificate and its key, and the certificate of the authority of the other end."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __str__(self) -> str:
        *first, last = map(str, self.paths)
        return f"{', '.join(first)} and {last}" if first else last

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.cert, self.key, self.ca) if path is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTls:
    """The contexts of a process's server and of its links to others; None: no TLS."""

    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None


class ReloadedContext(ssl.SSLContext):
    """A context whose new connections use the files as they are then; earlier connections keep theirs."""

    def __new__(cls, load: Callable[[], ssl.SSLContext], files: TlsFiles) -> "ReloadedContext":
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)  # itself it trusts nobody

    def __init__(self, load: Callable[[], ssl.SSLContext], files: TlsFiles) -> None:
        self._current = Reloaded(load, files.paths)

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        return self._current().wrap_bio(*arguments, **named)

    def wrap_socket(self, *arguments: Any, **named: Any) -> ssl.SSLSocket:
        return self._current().wrap_socket(*arguments, **named)


def load_tls(files: TlsFiles) -> NodeTls:
    """Load the three files of mutual TLS. Raises OSError (such as ssl.SSLError) if one is unusable."""
    return NodeTls(
        server=_mutual(ssl.PROTOCOL_TLS_SERVER, files), client=_mutual(ssl.PROTOCOL_TLS_CLIENT, files)
    )


def load_https(files: TlsFiles) -> ssl.SSLContext:
    """Load certificate and key of a public server, whose clients present none. Raises OSError."""

    def load() -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_SERVER, files, ssl.TLSVersion.TLSv1_2)
        context.set_alpn_protocols(["http/1.1"])
        return context

    return ReloadedContext(load, files)


def load_client(files: TlsFiles) -> ssl.SSLContext:
    """Load what a client needs that checks the server's name: authority, certificate and key if it has them.

    Without an authority those of the system are trusted. Raises OSError.
    """

    def load() -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_CLIENT, files, ssl.TLSVersion.TLSv1_2)
        if files.ca is None:
            context.load_default_certs()
        return context

    return ReloadedContext(load, files)


def _mutual(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    def load() -> ssl.SSLContext:
        context = _context(protocol, files, ssl.TLSVersion.TLSv1_3)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    return ReloadedContext(load, files)


def _context(protocol: int, files: TlsFiles, version: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = version
    if files.ca is not None:
        context.load_verify_locations(files.ca)
    if files.cert is not None:
        context.load_cert_chain(files.cert, files.key)
    return context
