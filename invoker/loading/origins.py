"""Where copies of images came from, and from where an image is taken no more after one was forged."""

from collections.abc import Set
from typing import TypeVar

from invoker.loading.image_copies import ImageCopy

_KEPT = 256

K = TypeVar("K")


class Origins:
    """The origins of the latest copies: `node:` and a node, or the label of another source."""

    def __init__(self) -> None:
        self._of_copies: dict[tuple[str, ImageCopy], set[str]] = {}
        self._distrusted: dict[str, set[str]] = {}  # by image

    def record(self, image: str, copy: ImageCopy, origins: set[str]) -> None:
        """Record from where this copy of an image came."""
        _keep_latest(self._of_copies)
        self._of_copies[image, copy] = origins

    def distrust(self, image: str, copy: ImageCopy, store: str | None) -> None:
        """Distrust the origins of this copy; but not the store (its label) where there are others."""
        _keep_latest(self._distrusted)
        origins = self._of_copies.pop((image, copy), set())
        if len(origins) > 1 and store is not None:
            origins.discard(store)  # it only filled what the others had left
        self._distrusted.setdefault(image, set()).update(origins)

    def distrusted(self, image: str) -> Set[str] | None:
        """Return the origins from which an image is not taken; None if no copy of it was forged."""
        return self._distrusted.get(image)


def node_origin(node: str) -> str:
    """Return the name of a node as a source, whatever the node is called: `disk` is not the store."""
    return f"node:{node}"


def _keep_latest(kept: dict[K, set[str]]) -> None:
    while len(kept) >= _KEPT:
        del kept[next(iter(kept))]
