"""Bodies of the admin API."""

import dataclasses
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from registry.api_key import ApiKey, SpendPeriod
from registry.function import Scaling, Task
from registry.live import Live

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Text = Annotated[str, Meta(max_length=4096)]
ShortText = Annotated[str, Meta(min_length=1, max_length=256)]
# Reports hold it, and a spreadsheet takes a cell that begins with =, +, - or @ for a formula. It has to
# match in Python's and in JavaScript's dialect: before a line's end `$` would hold too in the first.
Tenant = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.]([A-Za-z0-9_.@ -]{0,126}[A-Za-z0-9_.@-])?(?![\s\S])")]
NodeIds = Annotated[list[ShortText], Meta(max_length=4096)]
Seconds = Annotated[float, Meta(ge=0, le=10 * 365 * 86400)]
Nanos = Annotated[int, Meta(ge=0, le=2**53)]
Price = Annotated[int, Meta(ge=0, le=10**13)]
Concurrent = Annotated[int, Meta(ge=1, le=1_000_000)]
PerMinute = Annotated[int, Meta(ge=1, le=10**9)]


class ScalingPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scaling settings to change; what is left out stays. `max_instances: null` means all nodes."""

    min_instances: Annotated[int, Meta(ge=0, le=100_000)] | msgspec.UnsetType = msgspec.UNSET
    max_instances: Annotated[int, Meta(ge=1, le=100_000)] | msgspec.UnsetType | None = msgspec.UNSET
    target_concurrency: Annotated[int, Meta(ge=1, le=4096)] | msgspec.UnsetType = msgspec.UNSET
    keep_alive_s: Seconds | msgspec.UnsetType = msgspec.UNSET
    host_keep_alive_s: Seconds | msgspec.UnsetType = msgspec.UNSET
    live: Live | msgspec.UnsetType = msgspec.UNSET
    ttft_target_s: Annotated[float, Meta(ge=0, le=86400)] | msgspec.UnsetType = msgspec.UNSET

    def applied(self, scaling: Scaling) -> Scaling:
        """`scaling` with the changes. Raises InvalidRecord."""
        fields = {name: getattr(scaling, name) for name in self.__struct_fields__}
        given = {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not msgspec.UNSET
        }
        return Scaling(**(fields | given))

    @property
    def empty(self) -> bool:
        return all(getattr(self, name) is msgspec.UNSET for name in self.__struct_fields__)


class CreateFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Register a version. Its blobs must be in the store already."""

    name: ShortText
    task: Task
    architecture: ShortText
    image: Digest | None = None
    manifest: Digest | None = None
    assets: Annotated[dict[ShortText, Digest], Meta(max_length=4096)] = {}
    dtype: Annotated[str, Meta(max_length=32)] = ""
    context_length: Annotated[int, Meta(ge=0, le=100_000_000)] = 0
    scaling: ScalingPatch = ScalingPatch()
    description: Text = ""


class CreatedFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: int
    image: str | None
    bytes: int
    blocks: int


class PatchFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    scaling: ScalingPatch


class Rollback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The version to make current; by default the one before the current."""

    version: Annotated[int, Meta(ge=1)] | None = None


class Scale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    instances: Annotated[int, Meta(ge=0, le=100_000)]
    on: NodeIds = []
    wait: bool = True


class Warm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nodes: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    on: NodeIds = []


class Drop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tier: Literal["gpu", "host"]
    on: NodeIds = []


class MissingBlobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    digests: Annotated[list[Digest], Meta(max_length=65_536)]


class MissingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    missing: list[str]


class CreateKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenant: Tenant
    name: Annotated[str, Meta(max_length=256)] = ""
    role: Literal["admin", "caller"] = "caller"
    functions: Annotated[list[ShortText], Meta(max_length=1024)] = []
    expires_in_s: Annotated[float, Meta(gt=0, le=10 * 365 * 86400)] | None = None
    max_concurrent: Concurrent | None = None
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    spend_limit_nanos: Nanos | None = None
    spend_period: Literal["day", "month", "total"] = "month"


class PatchKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits to change; what is left out stays, null lifts a limit."""

    max_concurrent: Concurrent | msgspec.UnsetType | None = msgspec.UNSET
    requests_per_minute: PerMinute | msgspec.UnsetType | None = msgspec.UNSET
    tokens_per_minute: PerMinute | msgspec.UnsetType | None = msgspec.UNSET
    spend_limit_nanos: Nanos | msgspec.UnsetType | None = msgspec.UNSET
    spend_period: Literal["day", "month", "total"] | msgspec.UnsetType = msgspec.UNSET

    def applied(self, key: ApiKey) -> ApiKey:
        """`key` with the changes."""
        given = {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not msgspec.UNSET
        }
        if "spend_period" in given:
            given["spend_period"] = SpendPeriod(given["spend_period"])
        return dataclasses.replace(key, **given)


class CreateRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A price; it never changes: a new price is a new id. Of a device's rates the greatest id holds."""

    id: ShortText
    gpu_type: ShortText
    gpu_second_nanos: Price
    request_nanos: Price = 0
    prompt_mtoken_nanos: Price = 0
    completion_mtoken_nanos: Price = 0
    currency: Annotated[str, Meta(pattern="^[A-Z]{3}$")] = "USD"
