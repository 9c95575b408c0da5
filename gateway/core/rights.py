"""What a key may do: one table from its role to its rights. Each operation declares the one it needs."""

from enum import StrEnum

from registry.records.api_key import ApiKey, KeyRole


class Right(StrEnum):
    """What an operation needs of the key that asks for it."""

    NONE = "none"  # not even a key
    KEY = "key"  # any key that works
    CALL = "call"  # call functions, and list those which the key may call
    READ_FUNCTIONS = "read-functions"  # settings, versions and instances of functions
    MANAGE_FUNCTIONS = "manage-functions"  # upload, deploy, change, scale, delete; their logs
    READ_CLUSTER = "read-cluster"  # nodes, instances and casts
    READ_USAGE = "read-usage"  # reports and request records
    READ_LEDGER = "read-ledger"  # what belongs to no tenant: audit, list of the archive, prices
    ALL_TENANTS = "all-tenants"  # a scope: these rights for all tenants, not only the key's
    ADMIN = "admin"  # all the rest: keys, prices, archiving, deletion of data


RIGHTS: dict[KeyRole, frozenset[Right]] = {
    KeyRole.ADMIN: frozenset(Right),
    KeyRole.DEPLOYER: frozenset(
        {Right.KEY, Right.CALL, Right.READ_FUNCTIONS, Right.MANAGE_FUNCTIONS, Right.READ_USAGE}
    ),
    KeyRole.VIEWER: frozenset({Right.KEY, Right.READ_FUNCTIONS, Right.READ_CLUSTER, Right.ALL_TENANTS}),
    KeyRole.BILLING: frozenset({Right.KEY, Right.READ_USAGE, Right.READ_LEDGER, Right.ALL_TENANTS}),
    KeyRole.CALLER: frozenset({Right.KEY, Right.CALL, Right.READ_USAGE}),
}


def may(key: ApiKey, right: Right) -> bool:
    """Return whether the key's role has the right."""
    return right in RIGHTS[key.role]


def roles_with(right: Right) -> tuple[KeyRole, ...]:
    """Return the roles that have the right."""
    return tuple(role for role in KeyRole if right in RIGHTS[role])
