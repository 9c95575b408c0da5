"""A warning where what the gateway shows may be out of date."""

from cli.client import Client
from cli.errors import CliError
from cli.progress import note


def warn_if_unhealthy(client: Client) -> None:
    """Warn on stderr while the gateway cannot use Redis: what it shows is from before."""
    try:
        health = client.json("GET", "/health", expect=(200, 503))
    except CliError:
        return
    if health.get("state") == "silent":
        reason = health.get("state_reason") or "Redis is unavailable"
        note(f"warning: the cluster's state is not being updated: {reason}")
