"""What the benchmark of faults and a node of its casts tell each other: one JSON line a message."""

import msgspec


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Serve(_Message, frozen=True, kw_only=True):
    """Listen at `url`; answered by Serving. `rate_bytes_s` is of all that is sent, and of all that comes."""

    url: str
    rate_bytes_s: float


class Serving(_Message, frozen=True, kw_only=True):
    url: str


class CastTask(msgspec.Struct, frozen=True, kw_only=True):
    """One cast of an image from the first `sources` of the nodes at `urls`.

    `units` are the checksums of the image's units. Of the blocks that a node reads, the share `damage` has
    a byte flipped on its way.
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


class Hold(_Message, frozen=True, kw_only=True):
    """Be node `rank` of the cast, its memory in the file `path`; answered by Holding.

    With `kept` the file is what a killed node of that rank left: what is right of it stays.
    """

    rank: int
    path: str
    task: CastTask
    kept: bool = False


class Holding(_Message, frozen=True, kw_only=True):
    """`blocks` were kept."""

    blocks: int


class Go(_Message, frozen=True, kw_only=True):
    """Cast; answered by Done."""


class Done(_Message, frozen=True, kw_only=True):
    """When this node began and when it held everything, on the machine's monotonic clock.

    Of the blocks that came with a flipped byte, the checks found `found` and passed over `missed`. `lost`
    has the nodes that were given up, and why; `faults` counts of pulls by kind; `nbytes` what was pulled.
    """

    began_s: float
    ended_s: float
    nbytes: int = 0
    found: int = 0
    missed: int = 0
    lost: dict[str, str] = {}
    faults: dict[str, int] = {}


class End(_Message, frozen=True, kw_only=True):
    """Say what is held, withdraw it and forget it; answered by Ended."""


class Ended(_Message, frozen=True, kw_only=True):
    """The XXH3-128 of the bytes that were here."""

    digest: str


class Count(_Message, frozen=True, kw_only=True):
    """Answered by Counted."""


class Counted(_Message, frozen=True, kw_only=True):
    """What the node's process has now: its regions by name, and how many tasks."""

    regions: list[str]
    tasks: int


class Failed(_Message, frozen=True, kw_only=True):
    """The order could not be carried out; the process ends."""

    reason: str


Order = Serve | Hold | Go | End | Count
Answer = Serving | Holding | Done | Ended | Counted | Failed

encode = msgspec.json.Encoder().encode
decode_order = msgspec.json.Decoder(Order).decode
decode_answer = msgspec.json.Decoder(Answer).decode
