"""Ports to listen on."""

import socket
from collections.abc import Sequence
from contextlib import ExitStack

from cli.errors import CliError, UsageError


def usable_ports(host: str, ports: Sequence[int]) -> tuple[int, ...]:
    """Return `ports`, with a free one for each 0.

    Raises UsageError for a bad address, CliError for a port in use: without this check, responses of
    another program on the port could pass for the gateway's.
    """
    with ExitStack() as probes:  # all open at once, so that no free one is found twice
        return tuple(_bound(probes.enter_context(_probe(host)), host, port) for port in ports)


def _probe(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM)


def _bound(probe: socket.socket, host: str, port: int) -> int:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
    except socket.gaierror as exc:
        raise UsageError(f"--host {host}: {exc.strerror}") from exc
    except OSError as exc:
        raise CliError(
            f"cannot listen on port {port} of {host}: {exc.strerror}; "
            "see --host, and --port (0 takes any free one)"
        ) from exc
    return int(probe.getsockname()[1])
