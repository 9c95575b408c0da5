"""Built-in handlers, which run in the node itself without a process of their own."""

from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

from invoker.handlers.errors import BadHandler
from invoker.handlers.running import HandlerOutput
from registry.config.handler_spec import HandlerSpec


class EchoHandler:
    """Returns the body: measures the cost of a call that computes nothing."""

    async def start(
        self,
        files: Mapping[str, bytes],
        spec: HandlerSpec,
        scratch_dir: Path,
        secrets: Mapping[str, str],
    ) -> None:
        """Do nothing: there is nothing to load."""

    async def invoke(
        self, request_id: str, body: bytes, timeout_s: float, on_ended: Callable[[], None]
    ) -> AsyncGenerator[HandlerOutput, None]:
        try:
            yield HandlerOutput(data=body, stream=False)
        finally:
            on_ended()

    async def aclose(self) -> None:
        """Do nothing: no resource is held."""


_BUILTINS = {"echo": EchoHandler}


def make_builtin(name: str) -> EchoHandler:
    """Return the built-in handler of that name. Raises BadHandler."""
    try:
        return _BUILTINS[name]()
    except KeyError:
        raise BadHandler(f"this node has no built-in handler {name!r}: use {', '.join(_BUILTINS)}") from None
