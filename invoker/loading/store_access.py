"""Whether and how this node reads the cluster's blob store."""

import logging
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from registry.errors import RegistryError
from registry.images.digests import MARKER_FILE
from registry.images.store import BlobStore, open_store

log = logging.getLogger("invoker.store")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAccess:
    """A store that this node can read; `label` is `disk` (a folder of this machine) or `store`."""

    store: BlobStore
    label: str


async def reach_store(url: str, cluster_id: str) -> StoreAccess | None:
    """The store at `url` if it is the cluster's own; None, with a line in the log, if it is not."""
    folder = local_folder(url)
    if folder is not None and not (folder / MARKER_FILE).is_file():
        # On another machine the gateway's folder means nothing; opening it would create one.
        log.info("no store at %s on this machine: images come from other nodes", url)
        return None
    try:
        store = open_store(url)
        marked = await store.cluster()
    except RegistryError as error:
        log.warning("cannot read the store at %s: %s; images come from other nodes", url, error)
        return None
    if marked != cluster_id:
        log.warning("the store at %s belongs to cluster %s, not to ours: it is not used", url, marked)
        return None
    return StoreAccess(store=store, label="disk" if folder is not None else "store")


def local_folder(url: str) -> Path | None:
    """The folder that a store's URL names, None if it is not on this machine's file system."""
    if url.startswith("file:"):
        return Path(unquote(urlsplit(url).path))
    return None if "://" in url else Path(url)
