"""What a benchmark and the processes of a cast tell each other: one JSON line a message."""

import msgspec

from registry.images.manifest import UNIT_BYTES


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Hello(_Message, frozen=True, kw_only=True):
    """A process is there, and ready for orders. `url` and `host` are where one of ours serves regions."""

    rank: int
    url: str = ""
    host: str = ""


class CastTask(msgspec.Struct, frozen=True, kw_only=True):
    """How ours is to cast; peers have no choice in it. `window` is how many blocks a node pulls at once,
    `in_turn` whether they come one at a time instead, in the order of the plan's steps. `link_bytes_s` is the
    rate of the links, 0 if nobody is to know it."""

    planner: str
    blocks: int
    sources: int
    window: int
    in_turn: bool = False
    link_bytes_s: int = 0


class NodeAt(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node serves, and on which host it is."""

    url: str
    host: str


class Prepare(_Message, frozen=True, kw_only=True):
    """Have the image (sources), or room for it; answered by Ready. The rest is for ours.

    `units` are the checksums of the image's units, `cast` names this run.
    """

    nbytes: int
    seed: int
    cast: str = ""
    task: CastTask | None = None
    nodes: list[NodeAt] = []
    units: bytes = b""


class Ready(_Message, frozen=True, kw_only=True):
    pass


class Go(_Message, frozen=True, kw_only=True):
    """Cast; answered by Done."""


class Done(_Message, frozen=True, kw_only=True):
    """When this process began and when it held everything, on the machine's monotonic clock.

    `arrived_s` has the moment of each block, where the process knows it, `transports` the bytes by
    transport, `faults` how many pulls went wrong or elsewhere than planned, by kind.
    """

    began_s: float
    ended_s: float
    arrived_s: list[float] = []
    transports: dict[str, int] = {}
    faults: dict[str, int] = {}


class Check(_Message, frozen=True, kw_only=True):
    """Say what was received; answered by Checked. Not timed."""


class Checked(_Message, frozen=True, kw_only=True):
    """The XXH3-128 of the bytes that are here, and what the process used of processors since Go."""

    digest: str
    cpu_s: float


class Failed(_Message, frozen=True, kw_only=True):
    """The order could not be carried out; the process ends."""

    reason: str


Order = Prepare | Go | Check
Answer = Hello | Ready | Done | Checked | Failed

encode = msgspec.json.Encoder().encode
decode_order = msgspec.json.Decoder(Order).decode
decode_answer = msgspec.json.Decoder(Answer).decode


def block_bytes(nbytes: int, blocks: int) -> int:
    """Of blocks of whole units, so many as asked for or, where units do not divide so, somewhat fewer."""
    units = -(-nbytes // UNIT_BYTES)
    return -(-units // min(blocks, units)) * UNIT_BYTES
