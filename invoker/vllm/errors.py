"""Errors of vLLM servers."""

from invoker.engine.contract import EngineError


class ServerFailed(EngineError):
    """The server did not start, or it has ended."""

    code = "start_failed"
