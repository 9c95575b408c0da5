"""TLS between the nodes of a cluster: both ends present a certificate of the cluster's own authority.

Names in certificates are not checked: every certificate of that authority is a node's.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files: a node's certificate and its key, and the certificate of the authority."""

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTls:
    """The contexts of a node's server and of its links to others; None: no TLS."""

    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None


def load_tls(files: TlsFiles) -> NodeTls:
    """Load the files. Raises OSError (such as ssl.SSLError) if one is missing or invalid."""
    return NodeTls(
        server=_context(ssl.PROTOCOL_TLS_SERVER, files), client=_context(ssl.PROTOCOL_TLS_CLIENT, files)
    )


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.cert, files.key)
    return context
