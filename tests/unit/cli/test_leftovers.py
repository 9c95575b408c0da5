"""What `up` removes of platforms that were killed whole, and what it leaves."""

from pathlib import Path

from cli.supervise.leftovers import cluster_of, remove_leftovers
from invoker.host_tier.tier import HostTier
from registry.images.digests import MARKER_FILE, encode_marker


def abandoned(folder: Path) -> Path:
    """Return a tier as its processes leave it when they are killed: their locks are gone."""
    folder.mkdir(parents=True)
    for name in ("users", "lock", "a" * 64):
        (folder / name).touch()
    return folder


def test_only_tiers_of_other_clusters_that_nobody_uses_go(tmp_path: Path) -> None:
    own, dead, owing = (tmp_path / f"hypercast-{name}" for name in ("own", "dead", "owing"))
    for cluster in (own, dead, owing):
        abandoned(cluster / "h0")
    journal = owing / ".journals" / "n.1.journal"
    journal.parent.mkdir()
    journal.touch()
    (other := tmp_path / "hypercast-of-somebody").symlink_to(abandoned(tmp_path / "elsewhere" / "h0").parent)
    alive = HostTier(tmp_path / "hypercast-alive" / "h0", 1 << 20)
    remove_leftovers("own", tmp_path)
    assert (own / "h0" / ("a" * 64)).exists()
    assert not dead.exists()
    assert journal.exists() and not (owing / "h0").exists()
    assert (alive.directory / "users").exists()
    assert (other / "h0").exists()
    alive.close()
    remove_leftovers("", tmp_path)
    assert not own.exists()


def test_a_data_directory_names_its_cluster(tmp_path: Path) -> None:
    assert cluster_of(tmp_path) == ""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / MARKER_FILE).write_bytes(encode_marker("abc"))
    assert cluster_of(tmp_path) == "abc"
