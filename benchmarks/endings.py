"""How a benchmark ends when it is asked to."""

import signal


def end_politely() -> None:
    """Let SIGTERM end this program as Ctrl-C does: what it started would live on otherwise."""
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
