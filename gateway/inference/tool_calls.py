"""Tool calls in generated text, in the forms that common chat templates teach (pure).

| form | text |
|---|---|
| tagged (Hermes, Qwen) | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere, repeated |
| whole (Llama 3, Mistral) | the text is one object, or a list of them: `{"name": …, "parameters": {…}}` |

What is not such a call, or names no tool of the request, stays text.
"""

import json
import secrets
from collections.abc import Collection
from enum import Enum

import msgspec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON, _LIST = "<|python_tag|>", "[TOOL_CALLS]"


class ToolForm(Enum):
    """How a model writes calls."""

    TAGGED = "tagged"
    WHOLE = "whole"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


def tool_form(template: str) -> ToolForm | None:
    """Return the form that a chat template teaches, None for an unknown one."""
    if _OPEN in template:
        return ToolForm.TAGGED
    return ToolForm.WHOLE if _PYTHON in template or _LIST in template else None


class ToolReader:
    """Splits a text, as it grows, into calls of the named tools and the rest."""

    def __init__(self, form: ToolForm, names: Collection[str]) -> None:
        self._form = form
        self._names = frozenset(names)
        self._held = ""  # may become a call
        self._is_text = False  # of the whole form: it has begun as text

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the text and the calls that are certain now."""
        self._held += text
        return self._read_tagged() if self._form is ToolForm.TAGGED else self._read_whole()

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest, at the end of the text."""
        held, self._held = self._held, ""
        if self._form is ToolForm.WHOLE and not self._is_text:
            calls = self._calls_of(held.strip().removeprefix(_PYTHON).removeprefix(_LIST))
            return ("", calls) if calls else (held, [])
        return held, []

    def _read_tagged(self) -> tuple[str, list[ToolCall]]:
        said, calls = "", list[ToolCall]()
        while True:
            start = self._held.find(_OPEN)
            if start < 0:
                kept = _overlap(self._held, _OPEN)
                said += self._held[: len(self._held) - kept]
                self._held = self._held[len(self._held) - kept :]
                return said, calls
            said, self._held = said + self._held[:start], self._held[start:]
            end = self._held.find(_CLOSE)
            if end < 0:
                return said, calls
            found = self._calls_of(self._held[len(_OPEN) : end])
            whole, self._held = self._held[: end + len(_CLOSE)], self._held[end + len(_CLOSE) :]
            if found:
                calls += found
                said = said.rstrip("\n") if calls else said
                self._held = self._held.lstrip("\n")
            else:
                said += whole

    def _read_whole(self) -> tuple[str, list[ToolCall]]:
        start = self._held.lstrip()
        begins = not start or start[0] in "{[" or _PYTHON.startswith(start) or start.startswith(_PYTHON)
        if self._is_text or not begins:
            self._is_text = True
            held, self._held = self._held, ""
            return held, []
        return "", []

    def _calls_of(self, text: str) -> list[ToolCall]:
        """Return the calls that a text is, none unless all of it are calls of known tools."""
        try:
            decoded = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls = []
        for item in decoded if isinstance(decoded, list) else [decoded]:
            name = item.get("name") if isinstance(item, dict) else None
            if not isinstance(name, str) or name not in self._names:
                return []
            arguments = item.get("arguments", item.get("parameters", {}))
            if isinstance(arguments, str) and not _is_unicode(arguments):
                return []
            calls.append(
                ToolCall(
                    id=f"call_{secrets.token_hex(12)}",
                    name=name,
                    arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
                )
            )
        return calls


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, by an escape
        return False
    return True


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may begin `mark`."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
