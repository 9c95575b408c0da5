"""The message of `up` once all is ready."""

from collections.abc import Sequence

from cli.progress import note
from cli.supervise.settings import UpSettings
from cli.values import human_bytes


def announce(settings: UpSettings, urls: Sequence[str]) -> None:
    """Show what is running and how to reach it."""
    where = f" on {settings.hosts} virtual hosts" if settings.hosts else ""
    at = " and ".join(urls)
    nodes = f"{settings.nodes} node{'' if settings.nodes == 1 else 's'}"
    note(f"Hypercast is ready at {at}: {nodes}{where}, device {settings.device}")
    note(f"the console is at {urls[0]}/ui")
    rate = settings.options.link_rate_bytes_s
    if rate:
        note(f"model transfers are capped at {human_bytes(rate)}/s per node (an experiment)")
    for port in filter(None, settings.metrics_ports):
        note(f"metrics at http://{settings.options.metrics_host or settings.options.host}:{port}/metrics")
    note(f"  export HYPERCAST_URL={urls[0]}")
    note(f"  export HYPERCAST_API_KEY=$(cat {settings.data_dir / 'admin.key'})")
