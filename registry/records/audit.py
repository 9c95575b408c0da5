"""Records of the audit log: who changed what, from where, and how it ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class AuditLogName(StrEnum):
    """A log: refusals have one of their own, so that they push no change out of the other."""

    CHANGES = "changes"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One change, written before it is made. No value of a request is recorded but the target's name.

    `id` is that of the request; `role` is "" and `key_id` "" for changes that gateways make by themselves.
    `fields` are the names of what the request set, with the size of each value in bytes.
    """

    id: str
    at: float  # Unix seconds
    gateway: str
    operation: str
    target: str = ""
    key_id: str = ""
    tenant: str = ""
    role: str = ""
    address: str = ""
    client_request_id: str = ""
    fields: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOutcome:
    """How a change ended: the status of its response, the code of an error, and the id of what was made."""

    at: float
    status: int
    code: str = ""
    made: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """A change with its outcome, None while it runs and where its gateway died meanwhile."""

    entry: AuditEntry
    outcome: AuditOutcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditQuery:
    """Records of a log that were entered in `[since, until)` (Unix seconds), before `cursor` if set."""

    log: AuditLogName = AuditLogName.CHANGES
    since: float | None = None
    until: float | None = None
    cursor: str = ""
    limit: int = 100


CHANGES = AuditQuery()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Some records, the latest first, and the cursor of earlier ones ("" at the end)."""

    records: Sequence[AuditRecord]
    cursor: str = ""
