"""The record of an API key: its tenant, role and limits. The key itself is never stored."""

from dataclasses import dataclass
from enum import StrEnum

from registry.records.schema import BASE_SCHEMA, TENANCY_SCHEMA


class KeyRole(StrEnum):
    """The permissions of a key; the gateway's table (gateway/core/rights.py) has them one by one."""

    ADMIN = "admin"  # everything
    DEPLOYER = "deployer"  # manages its own tenant's functions, and does what a caller does
    VIEWER = "viewer"  # sees functions, nodes, instances and casts of all tenants
    BILLING = "billing"  # sees the usage of all tenants, and prices
    CALLER = "caller"  # calls functions, sees its own tenant's usage


class SpendPeriod(StrEnum):
    """The period of a spend limit: a UTC day, a UTC month, or all time."""

    DAY = "day"
    MONTH = "month"
    TOTAL = "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """The record of an API key of the form `hc_<id>_<secret>`.

    `id` is public; `digest` is the hex SHA-256 of the secret (secrets have 256 random bits, so no salt or
    stretching is needed). Empty `functions` means all functions. The limits hold for the whole cluster,
    None is no limit: requests and tokens per minute, concurrent requests, and cost per period.
    """

    id: str
    digest: str
    tenant: str
    role: KeyRole
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
    def schema(self) -> int:
        """The schema that the record needs."""
        return BASE_SCHEMA if self.role in (KeyRole.ADMIN, KeyRole.CALLER) else TENANCY_SCHEMA

    @property
    def limited(self) -> bool:
        """Whether requests of the key are counted before they are served."""
        return (
            self.max_concurrent is not None
            or self.requests_per_minute is not None
            or self.tokens_per_minute is not None
            or self.spend_limit_nanos is not None
        )
