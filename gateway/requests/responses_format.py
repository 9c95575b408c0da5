"""The responses of OpenAI's Responses API."""

from collections.abc import Sequence
from functools import partial

import msgspec

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
from gateway.schemas.responses import (
    IncompleteDetails,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)

_PLAIN_TEXT: Json = {"format": {"type": "text"}}


class ResponsesFormat(ReplyFormat):
    """A response of output items: messages and calls of functions. Its events are numbered."""

    def __init__(self, request: ResponsesRequest, options: ReplyOptions) -> None:
        self._request = request
        self._options = options
        self._number = 0  # of the next event
        self._output: list[Json] = []  # items that are complete
        self._text: list[str] | None = None  # of the message that is open

    async def whole(self, outcomes: Sequence[ChoiceResult], usage: ReplyUsage) -> bytes:
        (outcome,) = outcomes
        text, status = "".join(outcome.text), _status(outcome.finish_reason)
        if text or not outcome.calls:
            self._output.append(self._message(text, status))
        for call in outcome.calls:
            self._output.append(self._function_call(call, call.arguments, "completed"))
        return msgspec.json.encode(self._response(status, usage))

    def events(self, delta: ChoiceDelta, *, first: bool) -> bytes:
        parts = []
        if first:
            started = self._response("in_progress")
            parts += [
                self._event(f"response.{kind}", response=started) for kind in ("created", "in_progress")
            ]
        if delta.text:
            if self._text is None:
                parts.append(self._open_message())
            assert self._text is not None
            self._text.append(delta.text)
            parts.append(
                self._event("response.output_text.delta", **self._place, delta=delta.text, logprobs=[])
            )
        for call in delta.calls:
            parts.append(self._close_message("completed"))
            parts.append(self._call_events(call))
        return b"".join(parts)

    def finish(self, index: int, reason: str) -> bytes:
        raise AssertionError("a response has one choice")

    def end(self, last: ChoiceDelta, usage: ReplyUsage, facts: Json) -> bytes:
        status = _status(last.finish_reason)
        closing = b""
        if self._text is None and not self._output:
            closing = self._open_message()  # a response without any text
        closing += self._close_message(status)
        response = self._response(status, usage)
        return closing + self._event(f"response.{status}", response=response, hypercast=facts)

    def failure(self, error: ApiError) -> bytes:
        failed = self._response("failed", error={"code": "server_error", "message": error.message})
        return self._event("error", code=error.code, message=error.message, param=error.param) + self._event(
            "response.failed", response=failed
        )

    def _event(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        return named_event(kind, {"sequence_number": self._number - 1, **fields})

    @property
    def _place(self) -> Json:
        """Where the text of the open message belongs."""
        return {"item_id": self._item_id("msg"), "output_index": len(self._output), "content_index": 0}

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}-{self._options.id}-{len(self._output)}"

    def _open_message(self) -> bytes:
        self._text = []
        item = self._message("", "in_progress") | {"content": []}
        return self._event(
            "response.output_item.added", output_index=len(self._output), item=item
        ) + self._event("response.content_part.added", **self._place, part=_part(""))

    def _close_message(self, status: str) -> bytes:
        if self._text is None:
            return b""
        text, place = "".join(self._text), self._place
        item = self._message(text, status)
        events = (
            self._event("response.output_text.done", **place, text=text, logprobs=[])
            + self._event("response.content_part.done", **place, part=_part(text))
            + self._event("response.output_item.done", output_index=len(self._output), item=item)
        )
        self._text = None
        self._output.append(item)
        return events

    def _call_events(self, call: ToolCall) -> bytes:
        place: Json = {"item_id": self._item_id("fc"), "output_index": len(self._output)}
        item = self._function_call(call, call.arguments, "completed")
        started = self._function_call(call, "", "in_progress")
        made = "response.function_call_arguments"
        events = (
            self._event("response.output_item.added", output_index=len(self._output), item=started)
            + self._event(f"{made}.delta", **place, delta=call.arguments)
            + self._event(f"{made}.done", **place, name=call.name, arguments=call.arguments)
            + self._event("response.output_item.done", output_index=len(self._output), item=item)
        )
        self._output.append(item)
        return events

    def _message(self, text: str, status: str) -> Json:
        return {
            "id": self._item_id("msg"),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }

    def _function_call(self, call: ToolCall, arguments: str, status: str) -> Json:
        return {
            "id": self._item_id("fc"),
            "type": "function_call",
            "status": status,
            "call_id": call.id,
            "name": call.name,
            "arguments": arguments,
        }

    def _response(
        self, status: str, usage: ReplyUsage | None = None, error: Json | None = None
    ) -> ResponseObject:
        request = self._request
        return ResponseObject(
            id=self._options.id,
            created_at=self._options.created,
            status=status,  # type: ignore[arg-type]
            error=error,
            incomplete_details=(
                IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
            ),
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            model=self._options.model,
            output=list(self._output),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            temperature=request.temperature,
            text=request.text or _PLAIN_TEXT,
            tool_choice="auto" if request.tool_choice is None else request.tool_choice,
            tools=request.tools or [],
            top_p=request.top_p,
            usage=None if usage is None else _usage(usage),
            user=request.user,
            metadata=request.metadata or {},
        )


def responses_form(request: ResponsesRequest) -> ReplyForm:
    """Return the form of the response to a request, of which it repeats the settings."""
    return ReplyForm(prefix="resp", make=partial(ResponsesFormat, request))


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _usage(usage: ReplyUsage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt,
        output_tokens=usage.completion,
        total_tokens=usage.prompt + usage.completion,
    )


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
