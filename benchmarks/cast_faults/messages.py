"""The orders of a cast-faults benchmark to its nodes, and their replies."""

import msgspec

from benchmarks.harness.crew_messages import CrewMessage, CrewProtocol


class ServeRegions(CrewMessage, frozen=True, kw_only=True):
    """Listen at `url`; answered by RegionsServed. `rate_bytes_s` limits each direction."""

    url: str
    rate_bytes_s: float


class RegionsServed(CrewMessage, frozen=True, kw_only=True):
    """The address of the region server."""

    url: str


class FaultTask(msgspec.Struct, frozen=True, kw_only=True):
    """One cast of an image from the first `sources` of the nodes at `urls`.

    `units` has the checksums of the image's units; `damage` is the fraction of blocks corrupted in transit.
    """

    cast: str
    nbytes: int
    seed: int
    units: bytes
    blocks: int
    urls: list[str]
    sources: int
    planner: str
    transport: str
    damage: float
    digest: str = ""


class JoinCast(CrewMessage, frozen=True, kw_only=True):
    """Be node `rank` of the cast, with memory in the file `path`; answered by CastJoined.

    With `kept` the file is what a killed node of that rank left: its intact blocks are kept.
    """

    rank: int
    path: str
    task: FaultTask
    kept: bool = False


class CastJoined(CrewMessage, frozen=True, kw_only=True):
    """The number of blocks that were kept."""

    blocks: int


class RunCast(CrewMessage, frozen=True, kw_only=True):
    """Cast; answered by FaultCastFinished."""


class FaultCastFinished(CrewMessage, frozen=True, kw_only=True):
    """When this node started and when it held the whole image, on the machine's monotonic clock.

    The checks detected `found` corrupted blocks and missed `missed`. `lost` has the nodes declared lost,
    with the reason; `faults` counts pulls by kind; `nbytes` is the number of bytes pulled.
    """

    started_s: float
    ended_s: float
    nbytes: int = 0
    found: int = 0
    missed: int = 0
    lost: dict[str, str] = msgspec.field(default_factory=dict)
    faults: dict[str, int] = msgspec.field(default_factory=dict)


class LeaveCast(CrewMessage, frozen=True, kw_only=True):
    """Report the image's digest, then withdraw and release it; answered by CastLeft."""


class CastLeft(CrewMessage, frozen=True, kw_only=True):
    """The XXH3-128 of the image that was here."""

    digest: str


class CountResources(CrewMessage, frozen=True, kw_only=True):
    """Report the process's resources; answered by ResourceCount."""


class ResourceCount(CrewMessage, frozen=True, kw_only=True):
    """The process's regions by name, and its number of tasks."""

    regions: list[str]
    tasks: int


FaultOrder = ServeRegions | JoinCast | RunCast | LeaveCast | CountResources
FaultReply = RegionsServed | CastJoined | FaultCastFinished | CastLeft | ResourceCount

PROTOCOL = CrewProtocol.of(FaultOrder, FaultReply)
