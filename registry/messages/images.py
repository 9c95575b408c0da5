"""Messages about images: where they are, loading, checking and dropping them (see the table in `node`)."""

from typing import Annotated

import msgspec

from rdmacast.cast.record import CastPlan
from registry.messages.base import Message
from registry.records.engine import EngineKind

MAX_CAST_MEMBERS = 4096
MAX_LINK_PEERS = 32


class ImageHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A node that holds (or is loading) an image; `cast` is the address of its region server."""

    node: str
    host: str
    cast: str
    tier: str  # "gpu" or "host"


class ImageRef(msgspec.Struct, frozen=True, kw_only=True):
    """An image to fetch: its digest, the digest of its manifest, and its holders.

    With a `cast` the node joins it, and pulls missing blocks from `holders`. Without `holders` the node reads
    the store; otherwise only after all holders failed.
    """

    image: str
    manifest: str
    nbytes: int
    holders: tuple[ImageHolder, ...] = ()
    manifest_bytes: bytes = b""  # the manifest itself, so that a node needs no store for it
    cast: CastPlan | None = None


class WarmImage(Message, frozen=True, kw_only=True):
    """A request to bring an image into the node's host tier.

    With `pin` the copy is one that the cluster keeps: its host evicts it after all others, until an
    UnpinImage or a DropImage of it. A copy that exists already is only marked. With `preserve_pinned` the
    call fails (`out_of_memory`) rather than evict another pinned copy.
    """

    image: ImageRef
    function: str = ""
    version: int = 0
    pin: bool = False
    preserve_pinned: bool = False


class CheckModel(Message, frozen=True, kw_only=True):
    """A request whether the node's engines can run a model (`unsupported_model` if not): no image is read."""

    image: ImageRef
    config: bytes  # config.json
    dtype: str
    context_length: int
    engine: EngineKind = EngineKind.NATIVE
    engine_args: tuple[str, ...] = ()


class ModelChecked(Message, frozen=True, kw_only=True):
    """The engine can run the model. `natively`: so can the node's own."""

    natively: bool = True


class AddTokenizer(Message, frozen=True, kw_only=True):
    """A tokenizer.json of that SHA-256, for sequences with a grammar; the node keeps the last used ones."""

    digest: str
    content: bytes


class UnpinImage(Message, frozen=True, kw_only=True):
    """A request to unpin the host's copy of the image, which stays like any other copy."""

    image: str


class LinkPeer(msgspec.Struct, frozen=True, kw_only=True):
    """The region server of another node: its address and host."""

    cast: str
    host: str


class PrepareLinks(Message, frozen=True, kw_only=True):
    """A request to connect to peers before a cast needs them; answered when all were tried."""

    peers: Annotated[tuple[LinkPeer, ...], msgspec.Meta(max_length=MAX_LINK_PEERS)]


class DropImage(Message, frozen=True, kw_only=True):
    """A request to drop an idle image from `gpu`, `host` or `disk`."""

    image: str
    tier: str


class PullModel(Message, frozen=True, kw_only=True):
    """A request for a folder with these files and a link to the image, which is in the node's host tier.

    The image cannot be evicted until a CloseFolders. `name` is that of the folder.
    """

    name: str
    image: str
    files: dict[str, bytes]


class CloseFolders(Message, frozen=True, kw_only=True):
    """A request to remove the folders of an image that the node made for PullModel."""

    image: str


class ModelFolder(Message, frozen=True, kw_only=True):
    """The path of a model's folder on the node's machine."""

    path: str
