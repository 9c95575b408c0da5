"""What platforms that were killed whole left in shared memory: it would stay until the machine restarts."""

import os
from contextlib import suppress
from pathlib import Path

from invoker.tier_folder import USERS, remove_if_unused
from registry.errors import RegistryError
from registry.images.digests import MARKER_FILE, decode_marker

SHM = Path("/dev/shm")


def cluster_of(data_dir: Path) -> str:
    """The id of the cluster whose data these are, "" while it has none."""
    store = data_dir / "store"
    try:
        return decode_marker((store / MARKER_FILE).read_bytes(), str(store))
    except (OSError, RegistryError):
        return ""


def remove_leftovers(own_cluster: str, shm: Path = SHM) -> None:
    """Remove this user's host tiers of other clusters that no process uses.

    Their images can be read again. Journals stay: their clusters' ledgers are still owed what is in them.
    """
    for users in sorted(shm.glob(f"hypercast-*/*/{USERS}")):
        cluster = users.parents[1]
        with suppress(OSError):  # somebody else was quicker, or uses it again
            mine = not cluster.is_symlink() and cluster.stat().st_uid == os.geteuid()
            if mine and cluster.name != f"hypercast-{own_cluster}":
                remove_if_unused(users.parent, os.open(users, os.O_RDWR | os.O_CLOEXEC))
                cluster.rmdir()
