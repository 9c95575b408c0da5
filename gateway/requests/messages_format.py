"""The responses of Anthropic's Messages API."""

from collections.abc import Sequence

import msgspec

from gateway.core.error_forms import anthropic_error
from gateway.core.errors import ApiError
from gateway.inference.tool_calls import ToolCall
from gateway.requests.generation import ChoiceDelta, ChoiceResult
from gateway.requests.reply_format import (
    Json,
    ReplyForm,
    ReplyFormat,
    ReplyOptions,
    ReplyUsage,
    named_event,
)

_PREFIX = "msg"
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesFormat(ReplyFormat):
    """A message of content blocks: at most one text after another tool's use, and the uses of tools."""

    def __init__(self, options: ReplyOptions) -> None:
        self._options = options
        self._blocks = 0  # that were started
        self._text_is_open = False

    async def whole(self, outcomes: Sequence[ChoiceResult], usage: ReplyUsage) -> bytes:
        (outcome,) = outcomes
        text = "".join(outcome.text)
        content: list[Json] = [_text(text)] if text or not outcome.calls else []
        content += [_tool_use(call) | {"input": _input(call)} for call in outcome.calls]
        reason, stop = _stop_reason(outcome.finish_reason, outcome.stop), outcome.stop or None
        return msgspec.json.encode(self._message(content, reason, stop, usage))

    def events(self, delta: ChoiceDelta, *, first: bool) -> bytes:
        parts = []
        if first:
            usage = ReplyUsage(prompt=self._options.prompt_tokens, completion=0)
            parts.append(named_event("message_start", {"message": self._message([], None, None, usage)}))
        if delta.text:
            if not self._text_is_open:
                parts.append(self._open(_text("")))
                self._text_is_open = True
            parts.append(self._delta({"type": "text_delta", "text": delta.text}))
        for call in delta.calls:
            parts.append(self._close_text())
            parts.append(self._open(_tool_use(call) | {"input": {}}))
            parts.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
            parts.append(self._close())
        return b"".join(parts)

    def finish(self, index: int, reason: str) -> bytes:
        raise AssertionError("a message has one choice")

    def end(self, last: ChoiceDelta, usage: ReplyUsage, facts: Json) -> bytes:
        delta = {
            "stop_reason": _stop_reason(last.finish_reason, last.stop),
            "stop_sequence": last.stop or None,
        }
        ending = {"delta": delta, "usage": _usage(usage), "hypercast": facts}
        return self._close_text() + named_event("message_delta", ending) + named_event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        request_id = self._options.id.removeprefix(f"{_PREFIX}-")
        return named_event("error", anthropic_error(error, request_id))

    def _message(self, content: list[Json], reason: str | None, stop: str | None, usage: ReplyUsage) -> Json:
        return {
            "id": self._options.id,
            "type": "message",
            "role": "assistant",
            "model": self._options.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(usage),
        }

    def _open(self, block: Json) -> bytes:
        self._blocks += 1
        return named_event("content_block_start", {"index": self._blocks - 1, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return named_event("content_block_delta", {"index": self._blocks - 1, "delta": delta})

    def _close(self) -> bytes:
        return named_event("content_block_stop", {"index": self._blocks - 1})

    def _close_text(self) -> bytes:
        if not self._text_is_open:
            return b""
        self._text_is_open = False
        return self._close()


MESSAGES = ReplyForm(prefix=_PREFIX, make=MessagesFormat)


def _stop_reason(finish_reason: str, stop: str) -> str:
    return "stop_sequence" if stop else _REASONS.get(finish_reason, "end_turn")


def _usage(usage: ReplyUsage) -> Json:
    return {"input_tokens": usage.prompt, "output_tokens": usage.completion}


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _tool_use(call: ToolCall) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _input(call: ToolCall) -> object:
    """Return a call's arguments as the object which they should be."""
    try:
        found = msgspec.json.decode(call.arguments)
    except msgspec.DecodeError:
        found = call.arguments
    return found if isinstance(found, dict) else {"value": found}
