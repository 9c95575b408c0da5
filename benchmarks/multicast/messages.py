"""The orders of a multicast benchmark to the processes of a cast, and their replies."""

import msgspec

from benchmarks.harness.crew_messages import CrewMessage, CrewProtocol
from registry.images.manifest import UNIT_BYTES


class MulticastTask(msgspec.Struct, frozen=True, kw_only=True):
    """How our nodes cast; peers have no choice.

    `window` is how many blocks a node pulls concurrently; with `in_slots` they are pulled one at a time, in
    the order of the plan's steps. `link_bytes_s` is the links' rate if the nodes know it, else 0. `leaves`
    names the leaf switch of each node, if the nodes know it. With `fresh_links` nodes connect for each cast.
    With `apart` the sources and the first target have one processor, and the other targets the rest.
    """

    planner: str
    blocks: int
    sources: int
    window: int
    in_slots: bool = False
    link_bytes_s: int = 0
    leaves: list[str] = msgspec.field(default_factory=list)
    fresh_links: bool = False
    apart: bool = False


class NodeEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a node, and its host."""

    url: str
    host: str


class PrepareImage(CrewMessage, frozen=True, kw_only=True):
    """Hold the image (sources) or memory for it; answered by ImageReady.

    For our nodes `units` has the checksums of the image's units, `cast` names this run.
    """

    nbytes: int
    seed: int
    cast: str = ""
    task: MulticastTask | None = None
    nodes: list[NodeEndpoint] = msgspec.field(default_factory=list)
    units: bytes = b""


class ImageReady(CrewMessage, frozen=True, kw_only=True):
    """The memory is ready."""


class StartCast(CrewMessage, frozen=True, kw_only=True):
    """Cast; answered by CastFinished."""


class CastFinished(CrewMessage, frozen=True, kw_only=True):
    """When this process started and when it held the whole image, on the machine's monotonic clock.

    `arrived_s` has the time of each block, where known; `transports` the bytes by transport; `faults` the
    number of failed or replanned pulls by kind.
    """

    started_s: float
    ended_s: float
    arrived_s: list[float] = msgspec.field(default_factory=list)
    transports: dict[str, int] = msgspec.field(default_factory=dict)
    faults: dict[str, int] = msgspec.field(default_factory=dict)


class ReportDigest(CrewMessage, frozen=True, kw_only=True):
    """Report what was received, outside the measured time; answered by DigestReport."""


class DigestReport(CrewMessage, frozen=True, kw_only=True):
    """The XXH3-128 of the image here, and the process's CPU seconds since StartCast."""

    digest: str
    cpu_s: float


MulticastOrder = PrepareImage | StartCast | ReportDigest
MulticastReply = ImageReady | CastFinished | DigestReport

PROTOCOL = CrewProtocol.of(MulticastOrder, MulticastReply)


def block_bytes(nbytes: int, blocks: int) -> int:
    """Return the size of blocks of whole units: `blocks` of them, or fewer if units do not divide evenly."""
    units = -(-nbytes // UNIT_BYTES)
    return -(-units // min(blocks, units)) * UNIT_BYTES
