"""Access to the cluster's blob store."""

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
    """Return the store at `url`; None, with a log line, if it is not this cluster's."""
    folder = local_folder(url)
    if folder is not None and not (folder / MARKER_FILE).is_file():
        # The gateway's folder is on another machine; opening it would create one here.
        log.info("no store at %s on this machine: loading images from other nodes only", url)
        return None
    try:
        store = open_store(url)
        marked = await store.cluster()
    except RegistryError as error:
        log.warning("cannot read the store at %s: %s; loading images from other nodes only", url, error)
        return None
    if marked != cluster_id:
        log.warning("the store at %s belongs to cluster %s: not using it", url, marked)
        return None
    return StoreAccess(store=store, label="disk" if folder is not None else "store")


def local_folder(url: str) -> Path | None:
    """Return the folder of a store's URL; None if it is not on this machine's file system."""
    if url.startswith("file:"):
        return Path(unquote(urlsplit(url).path))
    return None if "://" in url else Path(url)
