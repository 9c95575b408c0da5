"""A function: a named model endpoint, and its immutable versions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import ceil
from typing import Any

from registry.errors import InvalidRecord
from registry.records.engine import EngineKind
from registry.records.live import LiveMode
from registry.records.rollout import Rollout
from registry.records.schema import BASE_SCHEMA, ENGINE_SCHEMA, TENANCY_SCHEMA

# Handlers that are part of the node; `builtin:NAME` is the architecture of their functions.
BUILTINS = frozenset({"echo"})
BUILTIN_PREFIX = "builtin:"

MAX_SHARES = 256
MIN_SCALE_DOWN_DELAY_S = 0.5
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class FunctionTask(StrEnum):
    """What a function computes, which determines its endpoints."""

    GENERATE = "generate"  # decoder: completions, chat
    EMBED = "embed"  # BERT-type encoder: embeddings
    CLASSIFY = "classify"  # ViT, ResNet: logits over labels
    FEATURES = "features"  # CLIP: text and image features
    HANDLER = "handler"  # custom code, or a handler that is part of the node


class ServingMode(StrEnum):
    """The setting `serving` of a function."""

    COLOCATED = "colocated"  # each instance runs prompts and continues them
    DISAGGREGATED = "disaggregated"  # some run prompts, others continue them; both numbers follow the load


class ScalingMode(StrEnum):
    """What the number of instances follows."""

    CONCURRENCY = "concurrency"  # the number of calls, `target_concurrency` for each instance
    LOAD = "load"  # waiting prompt tokens, decode step times and KV cache, by what instances were seen to do


class ScaleDown(StrEnum):
    """When the policy `load` stops an instance beyond the load."""

    START = "start"  # once it was kept for as long as a further start would take
    DELAY = "delay"  # once it was kept for `scale_down_delay`


# Settings that the policy `load` alone uses.
OF_LOAD = ("scale_down", "scale_down_delay_s", "tbt_target_s")


def default_policy(task: FunctionTask) -> ScalingMode:
    """Return the policy of a new function whose settings neither name one nor give a concurrency."""
    return ScalingMode.LOAD if task is FunctionTask.GENERATE else ScalingMode.CONCURRENCY


def default_scaling(task: FunctionTask) -> "Scaling":
    """Return the settings of a new function that gives none."""
    return Scaling(policy=default_policy(task), scale_down=ScaleDown.START)


def scale_down_of(given: Mapping[str, Any], otherwise: ScaleDown) -> ScaleDown:
    """Return when surplus instances stop by the given settings: a delay without a mode means `delay`."""
    assumed = ScaleDown.DELAY if "scale_down_delay_s" in given else otherwise
    return ScaleDown(given.get("scale_down", assumed))


def policy_of(given: Mapping[str, Any], otherwise: ScalingMode) -> ScalingMode:
    """Return the policy by the given settings: a target_concurrency without a policy means concurrency."""
    assumed = ScalingMode.CONCURRENCY if "target_concurrency" in given else otherwise
    return ScalingMode(given.get("policy", assumed))


def check_applies(given: Mapping[str, Any], policy: ScalingMode) -> None:
    """Raise InvalidRecord for given settings that the policy does not use."""
    if policy is ScalingMode.LOAD:
        return
    if given.get("serving") == ServingMode.DISAGGREGATED:
        raise InvalidRecord(
            "serving: disaggregated is possible only with the policy load, and this function scales by "
            "concurrency: set the policy load as well (--scaling load), or --serving colocated"
        )
    unused = [name for name in OF_LOAD if name in given]
    if unused:
        flags = " and ".join(f"{name} (--{name.removesuffix('_s').replace('_', '-')})" for name in unused)
        raise InvalidRecord(
            f"{flags} can be set only with the policy load, and this function scales by concurrency: "
            "set the policy load as well (--scaling load), or omit it"
        )


def check_policy(given: Mapping[str, Any], task: FunctionTask) -> None:
    """Raise InvalidRecord for the policy `load` where no tokens are generated, by which it decides."""
    if given.get("policy") == ScalingMode.LOAD and task is not FunctionTask.GENERATE:
        raise InvalidRecord(
            f"the policy load (--scaling load) is for functions with the task generate, not {task}: omit it, "
            "and set target_concurrency (--target-concurrency) if need be"
        )


def check_serving(serving: ServingMode, engine: EngineKind) -> None:
    """Raise InvalidRecord for disaggregated serving by an engine that hands no calls off."""
    if serving is ServingMode.DISAGGREGATED and engine is not EngineKind.NATIVE:
        raise InvalidRecord(
            f"serving: disaggregated is for the engine native, not {engine}: set --serving colocated"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Scaling settings, which may change without a new version.

    `max_instances=None` means all nodes. `live` is the mode of serving while the model is loading, and
    `ttft_target_s` the time to first token that its mode `auto` and `policy: load` aim for; `tbt_target_s` is
    the time between tokens that the latter aims for. `scale_down_delay_s` is how long it keeps instances
    beyond the load, but for the last one, where `scale_down` is `delay`.
    """

    min_instances: int = 0
    max_instances: int | None = None
    target_concurrency: int = 8
    keep_alive_s: float = 60.0  # idle time after which an instance is stopped
    host_keep_alive_s: float = 3600.0  # idle time after which a surplus host copy is dropped
    live: LiveMode = LiveMode.AUTO
    ttft_target_s: float = 1.0
    # An earlier release ignores the following; what it stored scales as it did.
    policy: ScalingMode = ScalingMode.CONCURRENCY
    scale_down_delay_s: float = 2.0
    tbt_target_s: float = 0.2
    host_copies: int = 1  # kept in the cluster's host memory: 1, or 0
    serving: ServingMode = ServingMode.COLOCATED
    scale_down: ScaleDown = ScaleDown.DELAY

    def __post_init__(self) -> None:
        if self.min_instances < 0:
            raise InvalidRecord(f"min_instances must be 0 or more, not {self.min_instances}")
        if self.max_instances is not None and self.max_instances < max(1, self.min_instances):
            raise InvalidRecord(
                f"max_instances must be at least 1 and at least min_instances, not {self.max_instances}"
            )
        if not 1 <= self.target_concurrency <= 4096:
            raise InvalidRecord(f"target_concurrency must be 1 to 4096, not {self.target_concurrency}")
        if not 0 <= self.keep_alive_s <= 30 * 86400:
            raise InvalidRecord(f"keep_alive must be 0 s to 30 days, not {self.keep_alive_s} s")
        if self.host_keep_alive_s < 0:
            raise InvalidRecord(f"host_keep_alive must be 0 s or more, not {self.host_keep_alive_s} s")
        if self.host_copies not in (0, 1):
            raise InvalidRecord(f"host_copies must be 0 or 1, not {self.host_copies}")
        if not 0 <= self.ttft_target_s <= 86400:
            raise InvalidRecord(f"ttft_target must be 0 s to 1 day, not {self.ttft_target_s} s")
        if not MIN_SCALE_DOWN_DELAY_S <= self.scale_down_delay_s <= 86400:
            raise InvalidRecord(f"scale_down_delay must be 500 ms to 1 day, not {self.scale_down_delay_s} s")
        if not 0 < self.tbt_target_s <= 3600:
            raise InvalidRecord(f"tbt_target must be above 0 s and at most 1 h, not {self.tbt_target_s} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionVersion:
    """One immutable version. `image`, `manifest` and the values of `assets` are SHA-256 hex digests.

    `image` and `manifest` are None for a handler without a model. `assets` maps relative file names
    (config.json, tokenizer.json, handler.py, …) to digests. `context_length` is in tokens, 0 where
    there is none. `deployed_by` is the id of the API key that deployed it, "" if unknown. `secrets` are the
    names of those which its instances need. `source` is the hub id of its model, and `revision` the commit
    that was deployed, "" for one from a local folder. `engine_args` are further arguments of another engine
    than the node's own; with `native_first` the node's own serves until that one is ready.
    """

    function: str
    version: int
    task: FunctionTask
    architecture: str
    image: str | None
    manifest: str | None
    image_bytes: int
    blocks: int
    dtype: str
    context_length: int
    assets: Mapping[str, str]
    created_at: float
    description: str = ""
    deployed_by: str = ""
    secrets: tuple[str, ...] = ()
    source: str = ""
    revision: str = ""
    engine: EngineKind = EngineKind.NATIVE
    engine_args: tuple[str, ...] = ()
    native_first: bool = False

    @property
    def schema(self) -> int:
        """The schema that the record needs: an earlier release would drop its engine, or names of secrets."""
        if self.engine is not EngineKind.NATIVE:
            return ENGINE_SCHEMA
        return TENANCY_SCHEMA if self.secrets else BASE_SCHEMA

    @property
    def runs_natively(self) -> bool:
        """Whether the nodes' own engine runs the model, for as long as another starts or always."""
        return self.image is not None and (self.engine is EngineKind.NATIVE or self.native_first)

    @property
    def runs_user_code(self) -> bool:
        """Whether the version has custom code, which only nodes with --allow-handlers run."""
        return self.task is FunctionTask.HANDLER and not self.architecture.startswith(BUILTIN_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Which tenant a function belongs to, and which tenants may call it.

    `owner` is "" for the operator of the platform. A private function is called by its owner and the tenants
    that it is shared with, another by all.
    """

    owner: str = ""
    private: bool = False
    shared_with: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.shared_with) > MAX_SHARES:
            raise InvalidRecord(f"a function is shared with at most {MAX_SHARES} tenants, or with all")

    @property
    def callers(self) -> frozenset[str] | None:
        """The tenants that may call the function; None for all."""
        return frozenset((self.owner, *self.shared_with)) if self.private else None


OPEN_ACCESS = Access()


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """The mutable head of a function: its current version, scaling, access and last rollout."""

    name: str
    current: int
    versions: tuple[int, ...]
    scaling: Scaling = field(default_factory=Scaling)
    created_at: float = 0.0
    access: Access = OPEN_ACCESS
    rollout: Rollout | None = None  # an earlier release ignores it: all requests go to the current version

    @property
    def active_rollout(self) -> Rollout | None:
        """The rollout in progress."""
        return self.rollout if self.rollout is not None and self.rollout.is_active else None

    @property
    def candidate(self) -> int | None:
        """The version that is being rolled out."""
        rollout = self.active_rollout
        return None if rollout is None else rollout.plan.candidate

    @property
    def served(self) -> tuple[int, ...]:
        """The versions that requests for the function by its name alone may go to."""
        return (self.current,) if self.candidate is None else (self.current, self.candidate)

    @property
    def candidate_scaling(self) -> Scaling:
        """The scaling settings of the version that is being rolled out.

        At least one instance of it runs, so that no request of its share waits for a start; of a minimum
        number it gets its share.
        """
        rollout = self.active_rollout
        percent = 0.0 if rollout is None else rollout.plan.percent
        return replace(self.scaling, min_instances=max(1, ceil(self.scaling.min_instances * percent / 100)))

    @property
    def schema(self) -> int:
        """The schema that the record and those of its versions need."""
        return BASE_SCHEMA if self.access == OPEN_ACCESS else TENANCY_SCHEMA


def check_name(name: str) -> str:
    """Return `name`, or raise InvalidRecord naming the rule it breaks."""
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidRecord(
            f"invalid function name {name!r}: "
            "use 1 to 63 of a-z, 0-9 and '-', starting with a letter or digit"
        )
    return name
