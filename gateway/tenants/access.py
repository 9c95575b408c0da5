"""Owners of functions and sharing: which keys may call, see and change a function, as pure decisions."""

from dataclasses import replace

import msgspec

from gateway.core.errors import ApiError, BadRequest, Forbidden
from gateway.core.rights import Right, may
from gateway.schemas.admin import AccessPatch
from gateway.tenants.auth import may_manage
from registry.records.api_key import ApiKey
from registry.records.function import OPEN_ACCESS, Access, Function
from registry.records.function_changes import no_function


def may_call(key: ApiKey, name: str, callers: frozenset[str] | None) -> bool:
    """Return whether the key may call a function that is open to `callers`, None for all tenants."""
    if key.functions and name not in key.functions:
        return False
    return callers is None or key.tenant in callers or may(key, Right.ALL_TENANTS)


def may_read(key: ApiKey, function: Function) -> bool:
    """Return whether the key may see that the function exists."""
    return may(key, Right.ALL_TENANTS) or may_call(key, function.name, function.access.callers)


def require_named(key: ApiKey, name: str, what: str = "call") -> None:
    """Raise Forbidden for a function that a key with a list of functions does not name."""
    if key.functions and name not in key.functions:
        raise Forbidden(f"this key may {what} other functions, but not {name!r}")


def require_manage(key: ApiKey, function: Function) -> None:
    """Raise Forbidden unless the key may change the function; NotFound if it may not even call it."""
    if may_manage(key, function.access.owner):
        return
    if not may_read(key, function):
        raise no_function(function.name)
    raise Forbidden(f"{function.name} belongs to another owner: this key may only call it")


def name_taken(name: str) -> ApiError:
    """Return the error of a name that another owner has."""
    return ApiError(409, "name_taken", f"the name {name!r} is taken: choose another")


def planned_access(key: ApiKey, name: str, patch: AccessPatch, known: Access | None) -> Access:
    """Return the access of a function that the key deploys or changes; `known` is None for a new one.

    Raises ApiError: a name that is taken, an owner that the key may not set, and sharing that has no meaning.
    """
    is_admin = may(key, Right.ADMIN)
    if not is_admin:
        require_named(key, name, "deploy")
    if known is not None and not may_manage(key, known.owner):
        raise name_taken(name)
    owner = known.owner if known is not None else "" if is_admin else key.tenant
    if patch.owner is not msgspec.UNSET and (patch.owner or "") != owner:
        if not is_admin:
            raise Forbidden("only an admin key makes a function another tenant's")
        owner = patch.owner or ""
    if known is None:
        private = bool(owner or patch.share)
        known = replace(OPEN_ACCESS, private=private)
    if patch.visibility is not msgspec.UNSET:
        known = replace(known, private=patch.visibility == "private")
    if not known.private:
        if patch.share or patch.unshare:
            raise BadRequest(f"{name} is public, so all tenants may call it: make it private first")
        return Access(owner=owner)
    shared = {*known.shared_with, *patch.share}.difference(patch.unshare, (owner,))
    return Access(owner=owner, private=True, shared_with=tuple(sorted(shared)))
