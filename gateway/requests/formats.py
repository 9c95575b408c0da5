"""The two JSON forms of generated text: completions and chat."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from gateway.core.errors import ApiError
from gateway.http.pieces import TimeSlice, join_arrays
from gateway.http.sse import DONE, encode_event
from gateway.inference.tool_calls import ToolCall
from gateway.requests.generation import ChoiceDelta, ChoiceResult
from gateway.requests.reply_format import Json, ReplyForm, ReplyFormat, ReplyOptions, ReplyUsage
from registry.messages.sampling import TokenLogprob

Logprobs = Sequence[tuple[int, TokenLogprob]]
_MARK = "<text>"
_PIECE_TOKENS = 16
_encode = msgspec.json.Encoder().encode


class ChunkFormat(ReplyFormat):
    """The encoder of one response of choices, whole or in chunks."""

    object = ""
    chunk_object = ""

    def __init__(self, options: ReplyOptions) -> None:
        self._options = options
        self._token_text = options.token_text
        self._head: Json = {
            "id": options.id,
            "object": self.chunk_object,
            "created": options.created,
            "model": options.model,
        }
        # Most chunks differ in their text only: the JSON around it is encoded once for each choice.
        self._is_plain = not options.token_ids and options.logprobs is None
        self._around: dict[int, tuple[bytes, bytes]] = {}

    async def whole(self, outcomes: Sequence[ChoiceResult], usage: ReplyUsage) -> bytes:
        # In time slices: logprobs may be many.
        choices: list[Json] = []
        for index, outcome in enumerate(outcomes):
            choice = self._whole_choice(index, outcome)
            choice["logprobs"] = await self._whole_logprobs(index, outcome.logprobs)
            choices.append(choice)
        whole = {"object": self.object, "choices": choices, "usage": _usage_json(usage)}
        return msgspec.json.encode(self._head | whole)

    def events(self, delta: ChoiceDelta, *, first: bool) -> bytes:
        opening = self._opening(delta.index) if first else None
        chunk = self.delta(delta, first=first and opening is None)
        sent = b"" if chunk is None else encode_event(chunk)
        return sent if opening is None else encode_event(opening) + sent

    def finish(self, index: int, reason: str) -> bytes:
        return encode_event(self._chunk([self._finish_choice(index, reason)]))

    def end(self, last: ChoiceDelta, usage: ReplyUsage, facts: Json) -> bytes:
        if not self._options.include_usage:
            choice = self._finish_choice(last.index, last.finish_reason)
            return encode_event(self._chunk([choice], facts)) + DONE
        sums: Json = {"choices": [], "usage": _usage_json(usage), "hypercast": facts}
        after = encode_event(msgspec.json.encode(self._head | sums))
        return self.finish(last.index, last.finish_reason) + after + DONE

    def failure(self, error: ApiError) -> bytes:
        return encode_event(error.envelope())

    def _opening(self, index: int) -> bytes | None:
        """Return a chunk to send before a choice's first text, if the form has one."""
        return None

    def delta(self, delta: ChoiceDelta, *, first: bool = False) -> bytes | None:
        """Return a chunk with new text, None if it would be empty.

        The `first` token has a chunk even while its text is a part of a character.
        """
        if self._is_plain and not delta.calls:
            if not (delta.text or (first and not delta.finish_reason)):
                return None
            before, after = self._around.get(delta.index) or self._encode_around(delta.index)
            return b"%b%b%b" % (before, _encode(delta.text), after)
        shown = (
            (first and not delta.finish_reason)
            or delta.text
            or delta.calls
            or (self._options.token_ids and delta.token_ids)
            or (self._options.logprobs is not None and delta.logprobs)
        )
        if not shown:
            return None
        return self._chunk([self._delta_choice(delta)])

    def _chunk(self, choices: list[Json], facts: Json | None = None) -> bytes:
        chunk = self._head | {"choices": choices}
        if self._options.include_usage:
            chunk["usage"] = None
        if facts is not None:
            chunk["hypercast"] = facts
        return msgspec.json.encode(chunk)

    def _encode_around(self, index: int) -> tuple[bytes, bytes]:
        """Return the JSON before and after the text of a choice's chunks."""
        chunk = self._chunk([self._delta_choice(ChoiceDelta(index=index, text=_MARK))])
        before, _, after = chunk.rpartition(_encode(_MARK))
        self._around[index] = before, after
        return before, after

    def _with_ids(self, choice: Json, token_ids: Sequence[int]) -> Json:
        if self._options.token_ids:
            choice["token_ids"] = token_ids
        return choice

    async def _whole_logprobs(self, index: int, logprobs: Logprobs) -> Json | None:
        whole: defaultdict[str, list[bytes]] = defaultdict(list)
        time_slice = TimeSlice()
        for first in range(0, len(logprobs) or 1, _PIECE_TOKENS):
            piece = self._logprobs(index, logprobs[first : first + _PIECE_TOKENS])
            if piece is None:
                return None
            for name, value in piece.items():
                whole[name].append(_encode(value))
            await time_slice.pause()
        return {name: None if parts[0] == b"null" else join_arrays(parts) for name, parts in whole.items()}

    @abstractmethod
    def _logprobs(self, index: int, logprobs: Logprobs) -> Json | None:
        """Return arrays with an entry for each token, None if the request wants none."""

    @abstractmethod
    def _whole_choice(self, index: int, outcome: ChoiceResult) -> Json: ...

    @abstractmethod
    def _delta_choice(self, delta: ChoiceDelta) -> Json: ...

    @abstractmethod
    def _finish_choice(self, index: int, reason: str) -> Json: ...


class CompletionFormat(ChunkFormat):
    """The form of /v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, options: ReplyOptions) -> None:
        super().__init__(options)
        self._offsets: dict[int, int] = {}

    def _whole_choice(self, index: int, outcome: ChoiceResult) -> Json:
        choice: Json = {
            "index": index,
            "text": "".join(outcome.text),
            "logprobs": None,
            "finish_reason": outcome.finish_reason,
        }
        return self._with_ids(choice, outcome.token_ids)

    def _delta_choice(self, delta: ChoiceDelta) -> Json:
        choice: Json = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.index, delta.logprobs),
            "finish_reason": None,
        }
        return self._with_ids(choice, delta.token_ids)

    def _finish_choice(self, index: int, reason: str) -> Json:
        choice: Json = {"index": index, "text": "", "logprobs": None, "finish_reason": reason}
        return self._with_ids(choice, ())

    def _logprobs(self, index: int, logprobs: Logprobs) -> Json | None:
        if self._options.logprobs is None:
            return None
        tokens = [self._token_text(token) for token, _ in logprobs]
        offset = self._offsets.get(index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for _, entry in logprobs],
            "top_logprobs": [{self._token_text(t): value for t, value in entry.top} for _, entry in logprobs],
            "text_offset": offsets,
        }


class ChatFormat(ChunkFormat):
    """The form of /v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _opening(self, index: int) -> bytes:
        delta: Json = {"role": "assistant", "content": ""}
        choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([self._with_ids(choice, ())])

    def _whole_choice(self, index: int, outcome: ChoiceResult) -> Json:
        choice: Json = {
            "index": index,
            "message": _message(outcome),
            "logprobs": None,
            "finish_reason": outcome.finish_reason,
        }
        return self._with_ids(choice, outcome.token_ids)

    def _delta_choice(self, delta: ChoiceDelta) -> Json:
        choice: Json = {
            "index": delta.index,
            "delta": _chat_delta(delta),
            "logprobs": self._logprobs(delta.index, delta.logprobs),
            "finish_reason": None,
        }
        return self._with_ids(choice, delta.token_ids)

    def _finish_choice(self, index: int, reason: str) -> Json:
        choice: Json = {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}
        return self._with_ids(choice, ())

    def _logprobs(self, index: int, logprobs: Logprobs) -> Json | None:
        if self._options.logprobs is None:
            return None
        content = []
        for token, entry in logprobs:
            content.append(
                self._entry(token, entry.logprob)
                | {"top_logprobs": [self._entry(other, value) for other, value in entry.top]}
            )
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        text = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


COMPLETIONS = ReplyForm(prefix="cmpl", make=CompletionFormat)
CHAT = ReplyForm(prefix="chatcmpl", make=ChatFormat)


def _usage_json(usage: ReplyUsage) -> Json:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }


def _message(outcome: ChoiceResult) -> Json:
    text = "".join(outcome.text)
    message: Json = {"role": "assistant", "content": text, "refusal": None}
    if outcome.calls:
        message |= {"content": text or None, "tool_calls": [_call(call) for call in outcome.calls]}
    return message


def _chat_delta(delta: ChoiceDelta) -> Json:
    if not delta.calls:
        return {"content": delta.text}
    numbered = enumerate(delta.calls, delta.first_call)
    calls = [{"index": number} | _call(call) for number, call in numbered]
    return ({"content": delta.text} if delta.text else {}) | {"tool_calls": calls}


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
