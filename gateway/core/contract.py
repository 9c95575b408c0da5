"""Protocols between the HTTP side of the gateway and its routing and scaling side.

The HTTP side builds a `FunctionCall` and reads its events. The dispatcher chooses the instance, starts one
where needed, queues, and retries on another instance after a failure.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from registry.messages.arrivals import Arrivals
from registry.messages.forward import ForwardedChunk, ForwardedHead, ForwardRequest
from registry.messages.node import (
    Arrays,
    Compute,
    Generate,
    HandlerChunk,
    InvokeHandler,
    RequestUsage,
    Tokens,
)
from registry.records.cast import CastState
from registry.records.change import NO_TRAFFIC, CallTraffic, Snapshot
from registry.records.function import FunctionVersion
from registry.records.instance import InstanceRecord
from registry.records.usage import GpuSlice
from registry.tracing.context import SpanContext

WAITS_FOR_NODE = "no-node"  # the stage of a call while the cluster has no usable node


class DispatchError(Exception):
    """A failed call: `code` as in the error envelope, `status` the HTTP status.

    | code | status |
    |---|---|
    | overloaded, draining | 503 (with retry_after_s) |
    | start_failed | 503; the message has the reason |
    | no_nodes | 503 |
    | timeout | 504; the message names the stage that ran out |
    | bad_request | 400 |
    | function_error | 500 |
    | internal | 500 |
    """

    def __init__(self, code: str, message: str, *, status: int, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Three independent time limits of a call, in seconds.

    `start_s` runs until the first output or the next progress of the start, `idle_s` between outputs, and
    `total_s` over the whole call.
    """

    start_s: float = 300.0
    idle_s: float = 60.0
    total_s: float = 1800.0


Work = Generate | Compute | InvokeHandler | ForwardRequest


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a function version; `work.instance_id` is "" until the dispatcher sets it.

    Calls of one `prefix` go to the same instance while its load allows; 0 for any. `most_tokens` bounds what
    a request computes that passes through. `span` is the place of its span, if its request is traced. A call
    in the `background` waits until no other waits, and leaves some slots free.
    """

    request_id: str
    tenant: str
    version: FunctionVersion
    work: Work
    deadlines: Deadlines = Deadlines()
    prefix: int = 0
    most_tokens: int = 0
    span: SpanContext | None = None
    background: bool = False


class WaitStage(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting call: `stage` is `queue`, `no-node`, `start` or a start phase, `fraction` 0 to 1."""

    stage: str
    fraction: float


class PulledModel(msgspec.Struct, frozen=True, kw_only=True):
    """A folder on the machine of `node` from which other engines can load a version of a function."""

    node: str
    host: str
    version: int
    folder: str


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """The assignment of a call to an instance, sent before the first output.

    It is sent again (the last one counts) if the call is retried on another instance, but never after the
    first output. `phases_ms` are the phases of the start that the call waited for, empty if the instance
    was ready.
    """

    instance_id: str
    node: str
    gpu_type: str
    gpu_count: int
    start_kind: str
    queue_ms: float
    load_ms: float
    phases_ms: Mapping[str, float] = msgspec.field(default_factory=dict)


Event = WaitStage | Assigned | Tokens | RequestUsage | Arrays | HandlerChunk | ForwardedHead | ForwardedChunk


class CallUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a call used on one of its instances.

    `exact`: the node's final figure. Otherwise it is the last one reported before the node was lost; the
    node writes the rest to the ledger itself (`LostCall`).
    """

    gpu: GpuSlice
    exact: bool


OnSettled = Callable[[Sequence[CallUsage]], None]
"""A callback with the usage of calls whose record is in the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutHealth:
    """What both versions have served in the window, and whether the candidate can serve.

    `ready` counts the candidate's instances, `failed_starts` those in a row since the last success, with the
    `start_error` of the last.
    """

    candidate: CallTraffic = NO_TRAFFIC
    stable: CallTraffic = NO_TRAFFIC
    ready: int = 0
    failed_starts: int = 0
    start_error: str = ""


class ClusterOperations(Protocol):
    """Operator requests to the running cluster."""

    def view(self) -> Snapshot:
        """Return the state as this gateway has it cached (no I/O)."""
        ...

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each change of the view, as long as this gateway runs."""
        ...

    def ended_parts(self, cast_id: str) -> Mapping[str, CastState]:
        """Return the nodes whose part in a cast has ended, with how; none of a cast that is not known."""
        ...

    def traffic(self) -> Mapping[tuple[str, int], CallTraffic]:
        """Return what this gateway has served of each version, by function and version."""
        ...

    def rollout_health(self, function: str) -> RolloutHealth:
        """Return how the versions of the function's rollout in progress have lately served."""
        ...

    async def rollout_started(self, function: str, rollout_id: str) -> None:
        """Return once the candidate of a rollout has a ready instance, or the rollout has ended.

        Raises DispatchError after ten minutes.
        """
        ...

    def arrivals(self, node: str) -> AsyncIterator[Arrivals]:
        """Yield what is arriving on a node, now and after each change, until closed.

        Raises ChannelError: the node is lost, or of a release that does not report it.
        """
        ...

    async def scale(self, function: str, instances: int, on: Sequence[str], *, wait: bool) -> None:
        """Set the number of instances once. Raises DispatchError (start_failed, no_nodes), NotFound."""
        ...

    async def cordon(self, node: str, *, cordoned: bool) -> None:
        """Have no further instances started on a node, or allow them again.

        It lasts until the node's process ends. Raises NotFound, DispatchError.
        """
        ...

    async def drain(self, node: str, *, wait: bool) -> Sequence[InstanceRecord]:
        """Cordon a node and have other nodes start what runs there; return the instances that it still has.

        An instance stops once others are ready, and its calls end on it. Waits until there are none. Raises
        NotFound; DispatchError (start_failed, no_nodes), after which what runs stays.
        """
        ...

    def warm(self, function: str, nodes: int | None, on: Sequence[str]) -> AsyncIterator[WaitStage]:
        """Prefetch the current version into host memory; ends when all requested nodes hold it."""
        ...

    def pull(self, function: str, on: str | None) -> AsyncIterator["WaitStage | PulledModel"]:
        """Prefetch the current version, and make a folder that other engines can load it from; it comes last.

        Raises DispatchError, NotFound.
        """
        ...

    async def check_model(self, version: FunctionVersion) -> bool:
        """Return whether the nodes' own engine runs the model, if some node has the version's engine.

        Raises DispatchError (unsupported_model).
        """
        ...

    async def ensure_host_copy(self, version: FunctionVersion) -> None:
        """Return once some node's host memory holds the version's image. Raises DispatchError."""
        ...

    async def drop(self, function: str, tier: str, on: Sequence[str]) -> None:
        """Drop the idle image from `gpu` or `host` of the named nodes (all if none named)."""
        ...

    def logs(self, function: str, since_version: int, lines: int, follow: bool) -> AsyncIterator[str]:
        """Yield log lines of the versions from `since_version` on, each prefixed with its node."""
        ...
