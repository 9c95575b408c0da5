"""Shared memory that killed platforms left behind: it would stay until the machine restarts."""

import os
from contextlib import suppress
from pathlib import Path

from invoker.host_tier.folder import USERS, remove_if_unused
from registry.errors import RegistryError
from registry.images.digests import MARKER_FILE, decode_marker

SHM = Path("/dev/shm")


def cluster_of(data_dir: Path) -> str:
    """Return the id of the cluster of a data directory, "" while it has none."""
    store = data_dir / "store"
    try:
        return decode_marker((store / MARKER_FILE).read_bytes(), str(store))
    except (OSError, RegistryError):
        return ""


def remove_leftovers(own_cluster: str, shm: Path = SHM) -> None:
    """Remove this user's host tiers of other clusters that no process uses.

    Their images can be read again. Journals stay: they hold records that are not in the ledger yet.
    """
    for users in sorted(shm.glob(f"hypercast-*/*/{USERS}")):
        cluster = users.parents[1]
        with suppress(OSError):  # another process removed it, or uses it again
            mine = not cluster.is_symlink() and cluster.stat().st_uid == os.geteuid()
            if mine and cluster.name != f"hypercast-{own_cluster}":
                remove_if_unused(users.parent, os.open(users, os.O_RDWR | os.O_CLOEXEC))
                cluster.rmdir()
