"""Request bodies of the admin API."""

import dataclasses
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.core.validation import COMMIT, CURRENCY, SHA256, TENANT
from registry.records.api_key import ApiKey, KeyRole, SpendPeriod
from registry.records.engine import MAX_ARG_CHARS, MAX_ENGINE_ARGS, EngineKind
from registry.records.function import (
    MAX_SHARES,
    MIN_SCALE_DOWN_DELAY_S,
    FunctionTask,
    ScaleDown,
    Scaling,
    ScalingMode,
    ServingMode,
    check_applies,
    policy_of,
    scale_down_of,
)
from registry.records.live import LiveMode
from registry.records.rollout import MAX_STEPS, RolloutLimits, RolloutPlan
from registry.records.secret import MAX_SECRET_BYTES

Digest = Annotated[str, Meta(pattern=SHA256)]
Text = Annotated[str, Meta(max_length=4096)]
ShortText = Annotated[str, Meta(min_length=1, max_length=256)]
# Spreadsheets treat a cell that starts with =, +, - or @ as a formula. The pattern must mean the same in
# Python and JavaScript: in Python `$` also matches before a final line break.
Tenant = Annotated[str, Meta(pattern=TENANT)]
NodeIds = Annotated[list[ShortText], Meta(max_length=4096)]
Seconds = Annotated[float, Meta(ge=0, le=10 * 365 * 86400)]
Nanos = Annotated[int, Meta(ge=0, le=2**53)]
Price = Annotated[int, Meta(ge=0, le=10**13)]
Concurrent = Annotated[int, Meta(ge=1, le=1_000_000)]
PerMinute = Annotated[int, Meta(ge=1, le=10**9)]
EngineArgs = Annotated[list[Annotated[str, Meta(max_length=MAX_ARG_CHARS)]], Meta(max_length=MAX_ENGINE_ARGS)]


class ScalingPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scaling settings to change; omitted ones stay. `max_instances: null` means all nodes.

    A `target_concurrency` without a `policy` sets the policy `concurrency`, and a `scale_down_delay_s`
    without a `scale_down` sets that to `delay`. A new function that generates has the policy `load`.
    `scale_down`, `scale_down_delay_s`, `tbt_target_s` and `serving: disaggregated` are refused where the
    policy is another.
    """

    min_instances: Annotated[int, Meta(ge=0, le=100_000)] | msgspec.UnsetType = msgspec.UNSET
    max_instances: Annotated[int, Meta(ge=1, le=100_000)] | msgspec.UnsetType | None = msgspec.UNSET
    target_concurrency: Annotated[int, Meta(ge=1, le=4096)] | msgspec.UnsetType = msgspec.UNSET
    keep_alive_s: Seconds | msgspec.UnsetType = msgspec.UNSET
    host_keep_alive_s: Seconds | msgspec.UnsetType = msgspec.UNSET
    host_copies: Annotated[int, Meta(ge=0, le=1)] | msgspec.UnsetType = msgspec.UNSET
    live: LiveMode | msgspec.UnsetType = msgspec.UNSET
    serving: ServingMode | msgspec.UnsetType = msgspec.UNSET
    ttft_target_s: Annotated[float, Meta(ge=0, le=86400)] | msgspec.UnsetType = msgspec.UNSET
    policy: ScalingMode | msgspec.UnsetType = msgspec.UNSET
    scale_down: ScaleDown | msgspec.UnsetType = msgspec.UNSET
    scale_down_delay_s: Annotated[float, Meta(ge=MIN_SCALE_DOWN_DELAY_S, le=86400)] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    tbt_target_s: Annotated[float, Meta(gt=0, le=3600)] | msgspec.UnsetType = msgspec.UNSET

    def applied(self, scaling: Scaling) -> Scaling:
        """Return `scaling` with the changes. Raises InvalidRecord."""
        fields = {name: getattr(scaling, name) for name in self.__struct_fields__}
        policy = policy_of(self.given, scaling.policy)
        check_applies({"serving": scaling.serving} | self.given, policy)
        scale_down = scale_down_of(self.given, scaling.scale_down)
        return Scaling(**(fields | self.given | {"policy": policy, "scale_down": scale_down}))

    @property
    def given(self) -> dict[str, Any]:
        """The settings to change."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value is not msgspec.UNSET}

    @property
    def empty(self) -> bool:
        return not self.given


class AccessPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The owner and sharing of a function, to change; what is omitted stays.

    A new function is its owner's and private; that of an admin key without `owner` is the operator's, and
    public unless it is shared. `owner: null` is the operator.
    """

    owner: Tenant | msgspec.UnsetType | None = msgspec.UNSET
    visibility: Literal["public", "private"] | msgspec.UnsetType = msgspec.UNSET
    share: Annotated[list[Tenant], Meta(max_length=MAX_SHARES)] = []
    unshare: Annotated[list[Tenant], Meta(max_length=MAX_SHARES)] = []


class CreateFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version to register. Its blobs must be in the store already.

    `replace_task` allows a task other than that of the function's current version. A model from a hub has
    its id as `source`, and the commit that was deployed as `revision`. `engine_args` are arguments of vLLM's
    server, for the engine `vllm` alone. Without `make_current` requests go on to the version that is current;
    the first version of a function is always made current.
    """

    name: ShortText
    task: FunctionTask
    architecture: ShortText
    image: Digest | None = None
    manifest: Digest | None = None
    assets: Annotated[dict[ShortText, Digest], Meta(max_length=4096)] = {}
    dtype: Annotated[str, Meta(max_length=32)] = ""
    context_length: Annotated[int, Meta(ge=0, le=100_000_000)] = 0
    scaling: ScalingPatch = ScalingPatch()
    access: AccessPatch = AccessPatch()
    description: Text = ""
    replace_task: bool = False
    source: Annotated[str, Meta(max_length=256)] = ""
    revision: Annotated[str, Meta(pattern=COMMIT)] = ""
    engine: EngineKind = EngineKind.NATIVE
    engine_args: EngineArgs = []
    make_current: bool = True


class CreatedFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: int
    image: str | None
    bytes: int
    blocks: int
    previous_version: int | None = None
    previous_architecture: str | None = None


class PatchFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    scaling: ScalingPatch = ScalingPatch()
    access: AccessPatch = AccessPatch()


class RollbackRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The version to make current, by default the one before the current."""

    version: Annotated[int, Meta(ge=1)] | None = None


class RolloutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rollout to begin, or the active one of the same version to change: what is omitted is the default.

    `percent` of the requests go to version `to`, and copies of `shadow_percent` of the others, whose answers
    are discarded. With `steps` the share becomes the next of them after `step_s` in good health, and the
    version is promoted after 100. It is rolled back once, over `window_s`, its rate of errors is above the
    current version's by more than `max_error_rate`, or its mean time to the first token is more than
    `max_ttft_ratio` times the current one's. With `wait` the answer comes once an instance of it is ready.
    """

    to: Annotated[int, Meta(ge=1)]
    percent: Annotated[float, Meta(ge=0, le=100)] | None = None
    shadow_percent: Annotated[float, Meta(ge=0, le=100)] = 0.0
    steps: Annotated[list[Annotated[float, Meta(gt=0, le=100)]], Meta(max_length=MAX_STEPS)] = []
    step_s: Annotated[float, Meta(ge=1, le=7 * 86400)] = 300.0
    max_error_rate: Annotated[float, Meta(ge=0, le=1)] = 0.05
    max_ttft_ratio: Annotated[float, Meta(ge=1, le=1000)] = 2.0
    min_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 5
    window_s: Annotated[float, Meta(ge=5, le=3600)] = 60.0
    wait: bool = False

    def plan(self) -> RolloutPlan:
        """Return the rollout. Raises InvalidRecord."""
        first = self.steps[0] if self.steps else 0.0
        return RolloutPlan(
            candidate=self.to,
            percent=first if self.percent is None else self.percent,
            shadow_percent=self.shadow_percent,
            steps=tuple(self.steps),
            step_s=self.step_s,
            limits=RolloutLimits(
                max_error_rate=self.max_error_rate,
                max_ttft_ratio=self.max_ttft_ratio,
                min_requests=self.min_requests,
                window_s=self.window_s,
            ),
        )


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    instances: Annotated[int, Meta(ge=0, le=100_000)]
    on: NodeIds = []
    wait: bool = True


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    wait: bool = True


class WarmRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nodes: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    on: NodeIds = []


class PullRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The node that is to have the folder; by default one that has the image already."""

    on: ShortText | None = None


class DropRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tier: Literal["gpu", "host", "disk"]
    on: NodeIds = []


class PutSecret(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of a secret: text of 1 to 16384 bytes in UTF-8 without NUL."""

    value: Annotated[str, Meta(min_length=1, max_length=MAX_SECRET_BYTES)]

    def __repr__(self) -> str:
        return "PutSecret(value=…)"


class MissingBlobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    digests: Annotated[list[Digest], Meta(max_length=8192)]


class MissingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    missing: list[str]


class CreateKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenant: Tenant
    name: Annotated[str, Meta(max_length=256)] = ""
    role: KeyRole = KeyRole.CALLER
    functions: Annotated[list[ShortText], Meta(max_length=1024)] = []
    expires_in_s: Annotated[float, Meta(gt=0, le=10 * 365 * 86400)] | None = None
    max_concurrent: Concurrent | None = None
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    spend_limit_nanos: Nanos | None = None
    spend_period: Literal["day", "month", "total"] = "month"


class PatchKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits to change; omitted ones stay, null lifts a limit."""

    max_concurrent: Concurrent | msgspec.UnsetType | None = msgspec.UNSET
    requests_per_minute: PerMinute | msgspec.UnsetType | None = msgspec.UNSET
    tokens_per_minute: PerMinute | msgspec.UnsetType | None = msgspec.UNSET
    spend_limit_nanos: Nanos | msgspec.UnsetType | None = msgspec.UNSET
    spend_period: Literal["day", "month", "total"] | msgspec.UnsetType = msgspec.UNSET

    def applied(self, key: ApiKey) -> ApiKey:
        """Return `key` with the changes."""
        given = {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not msgspec.UNSET
        }
        if "spend_period" in given:
            given["spend_period"] = SpendPeriod(given["spend_period"])
        return dataclasses.replace(key, **given)


class RotateKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For how long the former key still works."""

    grace_s: Seconds = 86400.0


class ArchiveUsage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which days to archive: those (UTC) that ended by `before`, in Unix seconds; null: all closed ones."""

    before: Annotated[float, Meta(ge=0, le=1e12)] | None = None


class DeleteUsage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenant: Annotated[str, Meta(min_length=1, max_length=256)]


class CreateRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A price, which is immutable: of a GPU type's rates the greatest id is in force."""

    id: ShortText
    gpu_type: ShortText
    gpu_second_nanos: Price
    request_nanos: Price = 0
    prompt_mtoken_nanos: Price = 0
    completion_mtoken_nanos: Price = 0
    currency: Annotated[str, Meta(pattern=CURRENCY)] = "USD"
