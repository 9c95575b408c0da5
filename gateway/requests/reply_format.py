"""The encoder of a generation's response, and what it is made with."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from gateway.core.errors import ApiError
from gateway.requests.generation import ChoiceDelta, ChoiceResult

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """Options of a generation's response. `model` is as the client wrote it."""

    id: str
    model: str
    created: int
    token_text: Callable[[int], str]
    token_ids: bool
    logprobs: int | None
    include_usage: bool
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyUsage:
    """The tokens of a request."""

    prompt: int
    completion: int


class ReplyFormat(ABC):
    """The encoder of one response, whole or as the events of a stream, in the form of one protocol."""

    @abstractmethod
    async def whole(self, outcomes: Sequence[ChoiceResult], usage: ReplyUsage) -> bytes:
        """Return the body of a response that is not streamed."""

    @abstractmethod
    def events(self, delta: ChoiceDelta, *, first: bool) -> bytes:
        """Return the events of an addition to a choice, b"" for none; with `first` those that open it."""

    @abstractmethod
    def finish(self, index: int, reason: str) -> bytes:
        """Return the events that end a choice while others go on."""

    @abstractmethod
    def end(self, last: ChoiceDelta, usage: ReplyUsage, facts: Json) -> bytes:
        """Return the events after the last delta, which ends the last choice."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Return the events that end a stream which has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyForm:
    """How the responses of an endpoint are made; their ids begin with `prefix`."""

    prefix: str
    make: Callable[[ReplyOptions], ReplyFormat]


def named_event(kind: str, fields: Json) -> bytes:
    """Return an event with a name, which is the `type` of its JSON as well."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
