"""Ports to listen on."""

import socket

from cli.errors import CliError, UsageError


def usable_port(host: str, port: int) -> int:
    """`port`, or any free one for 0. Raises UsageError for a bad address, CliError for a taken port.

    Without this look, another program's answers on the port could be taken for our gateway's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
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
