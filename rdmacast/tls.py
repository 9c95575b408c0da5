"""TLS between the nodes of a cluster: both ends show a certificate of the cluster's own authority.

Names in certificates are not looked at: whoever has one of that authority is a node.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NodeTls:
    """What a node's server and its links to others use."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def load_tls(cert: Path, key: Path, ca: Path) -> NodeTls:
    """Raises OSError or ssl.SSLError (an OSError, too) where a file is missing or none of that kind."""
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(ca)
        context.load_cert_chain(cert, key)
        contexts.append(context)
    return NodeTls(*contexts)
