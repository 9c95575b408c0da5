"""A function as the API shows it: whole to those that may manage or oversee it, in outline to its callers."""

from collections.abc import Sequence
from dataclasses import replace

from msgspec import UNSET, UnsetType

from gateway.schemas.answers import FunctionView
from gateway.tenants.auth import may_see_tenant
from registry.records.api_key import ApiKey
from registry.records.change import Snapshot
from registry.records.function import Function, FunctionVersion
from registry.records.scaling import ScalingRecord


def function_view(
    key: ApiKey,
    cluster: Snapshot,
    function: Function,
    current: FunctionVersion,
    history: Sequence[FunctionVersion] | UnsetType = UNSET,
    decision: ScalingRecord | UnsetType | None = UNSET,
) -> FunctionView:
    """Return what the key may see of a function that it may read."""
    access, shared_with = function.access, function.access.shared_with
    instances = [one for one in cluster.instances if one.function == function.name and one.takes_calls]
    known = [change.record for change in cluster.live]
    live = [one for one in known if (one.function, one.version) == (function.name, current.version)]
    rollout = function.rollout
    if not may_see_tenant(key, access.owner):
        # A digest is enough to deploy what it names, so it is shown only to those that may have that.
        outline = replace(current, image=None, manifest=None, assets={}, deployed_by="")
        current = replace(outline, secrets=(), source="", revision="")
        instances, live, history, shared_with, decision, rollout = [], [], UNSET, (), UNSET, None
    return FunctionView(
        name=function.name,
        current=current,
        versions=function.versions,
        scaling=function.scaling,
        created_at=function.created_at,
        owner=access.owner or None,
        visibility="private" if access.private else "public",
        shared_with=shared_with,
        instances=instances,
        live=live[0] if live else None,
        decision=decision,
        rollout=rollout,
        history=history,
    )
