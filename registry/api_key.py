"""An API key's record: who it is for and what it may do. The key itself is never stored."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    ADMIN = "admin"  # everything
    CALLER = "caller"  # calls functions, sees its own tenant's usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """`id` is public; `digest` is the hex SHA-256 of the secret (secrets carry 256 random bits, so no salt
    or stretching is needed); keys look like `hc_<id>_<secret>`. `functions` empty means all functions.
    `max_concurrent` bounds the requests that a gateway serves for the key at once (None: no bound)."""

    id: str
    digest: str
    tenant: str
    role: Role
    name: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    functions: tuple[str, ...] = ()
    max_concurrent: int | None = None
