"""From the response of another engine's server to what the client gets: the same, or a translation."""

from typing import Protocol

import msgspec

from gateway.core.contract import DispatchError
from gateway.core.errors import ApiError
from gateway.http.sse import DONE, encode_event
from gateway.inference.tool_calls import ToolCall
from gateway.requests.generation import ChoiceDelta, ChoiceResult
from gateway.requests.reply_format import Json, ReplyFormat, ReplyUsage

_ENDS_CHOICE = b'"finish_reason":"'


class Relay(Protocol):
    """The way of one response from the server to the client. The end of a choice is held back to `end`."""

    def pass_on(self, data: bytes) -> bytes:
        """Return the events that are sent for one of the server."""
        ...

    async def whole(self, data: bytes, usage: ReplyUsage) -> bytes:
        """Return the body for one of the server that is not streamed."""
        ...

    def end(self, usage: ReplyUsage, facts: Json) -> bytes:
        """Return the last events, once the request is billed."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Return the events of a stream that has failed."""
        ...


class Verbatim:
    """A response as the server sends it."""

    def __init__(self) -> None:
        self._held = b""  # the events from the end of a choice on

    def pass_on(self, data: bytes) -> bytes:
        event, sent = encode_event(data), b""
        if self._held and _ENDS_CHOICE not in data and b'"choices":[]' not in data:
            self._held, sent = b"", self._held  # another choice goes on
        if self._held or _ENDS_CHOICE in data:
            self._held += event
            return sent
        return sent + event

    async def whole(self, data: bytes, usage: ReplyUsage) -> bytes:
        return data

    def end(self, usage: ReplyUsage, facts: Json) -> bytes:
        return self._held + DONE

    def failure(self, error: ApiError) -> bytes:
        return encode_event(error.envelope())


class _Function(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    id: str | None = None
    function: _Function = _Function()


class _Spoken(msgspec.Struct, frozen=True, kw_only=True):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    delta: _Spoken = _Spoken()
    message: _Spoken = _Spoken()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Chat(msgspec.Struct, frozen=True, kw_only=True):
    choices: list[_Choice] = []


class Translated:
    """A chat's response in the form of another protocol. Calls of tools follow once they are complete."""

    def __init__(self, form: ReplyFormat) -> None:
        self._form = form
        self._decoder = msgspec.json.Decoder(_Chat)
        self._first = True
        self._calls: dict[int, list[_Call]] = {}  # the pieces of each
        self._last = ChoiceDelta(index=0, text="", finish_reason="stop")

    def pass_on(self, data: bytes) -> bytes:
        events = b""
        for choice in self._read(data):
            for piece in choice.delta.tool_calls or ():
                self._calls.setdefault(piece.index, []).append(piece)
            calls: tuple[ToolCall, ...] = ()
            if choice.finish_reason:
                calls = tuple(_joined(pieces) for _, pieces in sorted(self._calls.items()))
            delta = ChoiceDelta(
                index=0,
                text=choice.delta.content or "",
                calls=calls,
                finish_reason=choice.finish_reason or "",
                stop=_stop(choice),
            )
            events += self._form.events(delta, first=self._first)
            self._first = False
            if choice.finish_reason:
                self._last = delta
        return events

    async def whole(self, data: bytes, usage: ReplyUsage) -> bytes:
        result = ChoiceResult()
        for choice in self._read(data)[:1]:
            calls = [_joined([call]) for call in choice.message.tool_calls or ()]
            result.text.append(choice.message.content or "")
            result.calls += calls
            result.finish_reason, result.stop = choice.finish_reason or "stop", _stop(choice)
        return await self._form.whole([result], usage)

    def end(self, usage: ReplyUsage, facts: Json) -> bytes:
        return self._form.end(self._last, usage, facts)

    def failure(self, error: ApiError) -> bytes:
        return self._form.failure(error)

    def _read(self, data: bytes) -> list[_Choice]:
        try:
            return self._decoder.decode(data).choices
        except msgspec.MsgspecError:
            raise DispatchError("internal", "the engine's server sent what is no chat", status=500) from None


def _joined(pieces: list[_Call]) -> ToolCall:
    functions = [piece.function for piece in pieces]
    return ToolCall(
        id=next((piece.id for piece in pieces if piece.id), ""),
        name="".join(function.name or "" for function in functions),
        arguments="".join(function.arguments or "" for function in functions),
    )


def _stop(choice: _Choice) -> str:
    return choice.stop_reason if isinstance(choice.stop_reason, str) else ""
