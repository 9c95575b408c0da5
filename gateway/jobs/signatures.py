"""Signatures of webhooks as of Standard Webhooks 1.0: HMAC-SHA256 with a secret of each tenant. Pure."""

import base64
import hashlib
import hmac
from collections.abc import Sequence

_PREFIX = "whsec_"


def tenant_secret(cluster_secret: bytes, tenant: str) -> bytes:
    """Return the secret of a tenant's webhooks, which follows from the cluster's."""
    return hmac.digest(cluster_secret, b"hypercast webhooks\0" + tenant.encode(), hashlib.sha256)


def secret_text(secret: bytes) -> str:
    """Return a secret as receivers configure it."""
    return _PREFIX + base64.b64encode(secret).decode()


def signed_headers(secrets: Sequence[bytes], message_id: str, at: float, body: bytes) -> dict[str, str]:
    """Return the headers of a message sent at `at` (Unix seconds), with a signature by each secret.

    A receiver refuses old timestamps and ids that it has seen, so that a message cannot be replayed.
    """
    timestamp = str(int(at))
    content = f"{message_id}.{timestamp}.".encode() + body
    signatures = [
        "v1," + base64.b64encode(hmac.digest(secret, content, hashlib.sha256)).decode() for secret in secrets
    ]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(signatures),
    }
