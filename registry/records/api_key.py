"""An API key's record: who it is for and what it may do. The key itself is never stored."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    ADMIN = "admin"  # everything
    CALLER = "caller"  # calls functions, sees its own tenant's usage


class SpendPeriod(StrEnum):
    """Of UTC days and months; a total is never counted anew."""

    DAY = "day"
    MONTH = "month"
    TOTAL = "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """`id` is public; `digest` is the hex SHA-256 of the secret (secrets carry 256 random bits, so no salt
    or stretching is needed); keys look like `hc_<id>_<secret>`. `functions` empty means all functions.
    The limits hold for the cluster as a whole, None is no limit: requests and tokens a minute, requests
    at once, and what the requests of a period may cost."""

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
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    spend_limit_nanos: int | None = None
    spend_period: SpendPeriod = SpendPeriod.MONTH

    @property
    def limited(self) -> bool:
        """Whether its requests have to be counted before they are served."""
        return (
            self.max_concurrent is not None
            or self.requests_per_minute is not None
            or self.tokens_per_minute is not None
            or self.spend_limit_nanos is not None
        )
