"""Handlers that every node brings: they run in the node itself, without a process of their own."""

from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

from invoker.handlers.errors import BadHandler
from invoker.handlers.running import HandlerOutput
from registry.function_yaml import HandlerSpec


class Echo:
    """Sends the body back: what a call costs that computes nothing."""

    async def start(self, files: Mapping[str, bytes], spec: HandlerSpec, scratch_dir: Path) -> None:
        """Nothing is to be made ready."""

    async def invoke(
        self, request_id: str, body: bytes, timeout_s: float, over: Callable[[], None]
    ) -> AsyncGenerator[HandlerOutput, None]:
        try:
            yield HandlerOutput(data=body, stream=False)
        finally:
            over()

    async def aclose(self) -> None:
        """Nothing is held."""


_BUILTINS = {"echo": Echo}


def make_builtin(name: str) -> Echo:
    """Raises BadHandler for a name that this node does not know."""
    try:
        return _BUILTINS[name]()
    except KeyError:
        raise BadHandler(f"this node has no built-in handler {name!r}") from None
