"""The seam inside the gateway: HTTP above, routing and scaling below.

The HTTP side builds a `Call` and reads its events; which instance serves it, starting one, waiting,
and going on elsewhere after a failure are the dispatcher's.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from registry.change import Snapshot
from registry.function import FunctionVersion
from registry.messages import Arrays, Compute, Generate, HandlerChunk, InvokeHandler, Tokens, Usage
from registry.usage import GpuSlice

WAITS_FOR_NODE = "no-node"  # the stage of a call while no node is there at all


class DispatchError(Exception):
    """A call failed. `code` as in the error envelope, `status` the HTTP status.

    | code | status |
    |---|---|
    | overloaded, draining | 503 (with retry_after_s) |
    | start_failed | 503; the message carries the last lines of the failing part's log |
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
    """Three separate limits, in seconds: until the first output or progress of the start towards it,
    between outputs (idle), and for the whole call."""

    start_s: float = 300.0
    idle_s: float = 60.0
    total_s: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request for a function. `work.instance_id` is "" until the dispatcher fills it."""

    request_id: str
    tenant: str
    version: FunctionVersion
    work: Generate | Compute | InvokeHandler
    deadlines: Deadlines = field(default_factory=Deadlines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The call waits: `stage` is `queue`, `no-node`, `start` or a start phase, `fraction` 0 to 1."""

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """An instance took the call. Sent before the first output; again (the last one counts) if that
    instance did not serve it after all and another took it, but never after the first output.
    `phases_ms` are those of the start that the call waited for, empty if it found a ready instance."""

    instance_id: str
    node: str
    gpu_type: str
    gpu_count: int
    start_kind: str
    queue_ms: float
    load_ms: float
    phases_ms: Mapping[str, float] = field(default_factory=dict)


Event = Stage | Assigned | Tokens | Usage | Arrays | HandlerChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class CallUse:
    """What a call used on one of its instances. `exact`: the node's last word; else what it told before it
    was lost, and it writes the rest to the ledger by itself (`LostCall`)."""

    gpu: GpuSlice
    exact: bool


Settled = Callable[[Sequence[CallUse]], None]
"""Hears of calls whose record is in the ledger."""


class OpenCall(Protocol):
    """A call under way: iterate over its events, by one task. The last event of a good call is Usage."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def __anext__(self) -> Event:
        """Raises DispatchError."""
        ...

    @property
    def used(self) -> tuple[CallUse, ...]:
        """An entry for each instance that worked on it; final once the call's context has been left."""
        ...


class Dispatcher(Protocol):
    """Carries calls to instances. A call's deadlines are its reader's to keep (gateway/callrun.py)."""

    def run(self, call: Call) -> AbstractAsyncContextManager[OpenCall]:
        """Open the call. Raises DispatchError on entry (admission). Leaving the context early cancels it on
        the node at once, and then waits a moment for the node to say what the call used in all."""
        ...


class Cluster(Protocol):
    """What operators ask of the running cluster."""

    def view(self) -> Snapshot:
        """The state as this gateway knows it now (no I/O)."""
        ...

    async def scale(self, function: str, instances: int, on: Sequence[str], *, wait: bool) -> None:
        """Set the number of instances once. Raises DispatchError (start_failed, no_nodes), NotFound."""
        ...

    def warm(self, function: str, nodes: int | None, on: Sequence[str]) -> AsyncIterator[Stage]:
        """Fill host tiers of the current version; ends when all asked for hold it."""
        ...

    async def ensure_host_copy(self, version: FunctionVersion) -> None:
        """Return once some node's host memory holds the version's image. Raises DispatchError."""
        ...

    async def drop(self, function: str, tier: str, on: Sequence[str]) -> None:
        """Drop the idle image from `gpu` or `host` of the named nodes (all if none named)."""
        ...

    def logs(self, function: str, lines: int, follow: bool) -> AsyncIterator[str]:
        """Log lines of the function from all nodes, each prefixed with its node."""
        ...


class Blobs(Protocol):
    """The part of the content-addressed store that the gateway uses (registry/images/store.py)."""

    @property
    def url(self) -> str: ...

    async def size(self, digest: str) -> int | None:
        """Bytes of a complete blob, None if the store lacks it."""
        ...

    async def read(self, digest: str, *, limit: int) -> bytes:
        """A small blob whole. Raises NotFound, StoreError (over `limit`), CorruptImage."""
        ...

    async def partial_size(self, digest: str) -> int:
        """How much of an unfinished upload is there."""
        ...

    async def append(self, digest: str, offset: int, chunks: AsyncIterator[bytes], *, total: int) -> int:
        """Add bytes to an upload at `offset` (must equal partial_size); returns the new partial size.

        When `total` is reached the SHA-256 is checked and the blob becomes visible, atomically.
        Raises Conflict (wrong offset), CorruptImage (wrong digest: the partial is dropped), StoreFull.
        """
        ...

    async def delete(self, digest: str) -> None: ...

    async def digests(self) -> list[str]: ...

    async def last_used(self) -> dict[str, float | None]:
        """All complete blobs, each with the Unix time when it was finished or last touched; None where the
        backend does not tell."""
        ...

    async def touch(self, digest: str) -> None:
        """Note that somebody counts on a blob, where the backend can; nothing happens if there is none."""
        ...

    async def partials(self) -> dict[str, float | None]:
        """All unfinished uploads, each with the Unix time of its last bytes; None where the backend does
        not tell."""
        ...

    async def drop_partial(self, digest: str) -> bool:
        """Remove an unfinished upload, unless somebody is writing it; says whether it was removed."""
        ...
