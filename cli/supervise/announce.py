"""What `up` says once all is ready."""

from collections.abc import Sequence

from cli.progress import note
from cli.up_settings import UpSettings


def announce(settings: UpSettings, urls: Sequence[str]) -> None:
    """Say what runs and how to reach it."""
    where = f" on {settings.hosts} virtual hosts" if settings.hosts else ""
    at = " and ".join(urls)
    note(f"Hypercast is ready at {at}: {settings.nodes} node(s){where}, device {settings.device}")
    if settings.link_rate:
        note(f"model transfers are capped at {settings.link_rate} a node (an experiment)")
    note(f"  export HYPERCAST_URL={urls[0]}")
    note(f"  export HYPERCAST_API_KEY=$(cat {settings.data_dir / 'admin.key'})")
