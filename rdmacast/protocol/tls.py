"""TLS between the nodes of a cluster: both ends show a certificate of the cluster's own authority.

Names in certificates are not looked at: whoever has one of that authority is a node.
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
    """What a node's server and its links to others use; None: no TLS."""

    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None


def load_tls(files: TlsFiles) -> NodeTls:
    """Raises OSError (ssl.SSLError is one) where a file is missing, or not what it should be."""
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
