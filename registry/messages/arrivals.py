"""Messages about what is arriving on a node, for those that watch a load (see the table in `node`)."""

from typing import Annotated

import msgspec

from registry.messages.base import Message
from registry.messages.live import MAX_HELD_BYTES

MAX_CELLS = 512  # of an image that is arriving
MAX_ARRIVING = 256  # images, and instances, of one node

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Held = Annotated[bytes, msgspec.Meta(max_length=MAX_HELD_BYTES)]
_Cells = Annotated[int, msgspec.Meta(ge=1, le=MAX_CELLS)]
_Layers = Annotated[int, msgspec.Meta(ge=0, le=8 * MAX_HELD_BYTES)]


class FollowArrivals(Message, frozen=True, kw_only=True):
    """A request for what is arriving on the node: at once, then after changes until cancelled.

    Reports are at least `interval_ms` apart.
    """

    interval_ms: Annotated[int, msgspec.Meta(ge=20, le=10_000)] = 100


class ArrivingImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that fills: bit i of `held` (little-endian) for its i-th part of `cells` equal ones."""

    image: _Name
    cells: _Cells
    held: _Held


class ArrivingLayers(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that loads: bit i of `held` (little-endian) for each of its `layers` on the accelerator."""

    instance_id: _Name
    layers: _Layers
    held: _Held


class Arrivals(Message, frozen=True, kw_only=True):
    """What arrives on the node at `at`, in Unix seconds of its clock; what is complete is in neither list."""

    at: float
    images: Annotated[tuple[ArrivingImage, ...], msgspec.Meta(max_length=MAX_ARRIVING)] = ()
    instances: Annotated[tuple[ArrivingLayers, ...], msgspec.Meta(max_length=MAX_ARRIVING)] = ()
