"""Mixed load whose clients note what they were told: streams, whole answers, handlers, clients that leave."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import httptools

MODEL, ECHO, HANDLER = "coder", "echo", "counter"
_PROMPTS = ("def add(a, b):", "class Tree:", "import os\n", "for i in range(", "# Sort a list", "x = [")
_LEAVE_AT = 3  # events
_PAUSE_S = 0.08  # at most, between two requests of a client
_REFUSED_PAUSE_S = 0.25
_AGAIN = 0.3  # of the requests that went wrong are asked again under their id


class Fate(StrEnum):
    """How a request ended for its client."""

    ACKNOWLEDGED = "acknowledged"  # its last byte arrived
    LEFT = "left"  # the client went, as it meant to
    REFUSED = "refused"  # 503 with Retry-After
    FAILED = "failed"  # an error after the first byte, or of the function itself
    CUT = "cut"  # the connection broke
    UNREACHED = "unreached"  # there was none
    HUNG = "hung"  # nothing for too long
    WRONG = "wrong"  # anything else; `detail` says what


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request has to bring."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kind of request; `answer` is what it gives when nothing fails, once that is known."""

    name: str
    function: str
    path: str
    body: bytes
    streams: bool = False
    leaves: bool = False
    answer: Answer | None = None


@dataclass(slots=True, kw_only=True)
class Asked:
    """One request and what came of it. Times are of `time.monotonic`."""

    request_id: str
    work: str
    function: str
    tenant: str
    gateway: int
    sent_s: float
    ended_s: float = 0.0
    fate: Fate = Fate.WRONG
    status: int = 0
    code: str = ""
    detail: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __str__(self) -> str:
        told = " ".join(str(part) for part in (self.status or "", self.code, self.detail) if part)
        return f"{self.request_id} ({self.work}, gateway {self.gateway}) {self.fate}: {told}"


def catalogue(tokens: int) -> list[Work]:
    """Greedy and seeded streams, whole answers, clients that leave, echoes, and a handler of one's own."""
    works = []
    for index, prompt in enumerate(_PROMPTS):
        base = {"model": MODEL, "prompt": prompt, "ignore_eos": True, "return_token_ids": True}
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        greedy = {**base, **streaming, "max_tokens": tokens, "temperature": 0}
        seeded = {**base, **streaming, "max_tokens": tokens, "temperature": 0.8, "seed": 100 + index}
        whole = {**base, "max_tokens": tokens // 4, "temperature": 0.5, "seed": 200 + index}
        long = {**greedy, "max_tokens": tokens * 4}
        for name, body in (("greedy", greedy), ("seeded", seeded), ("whole", whole), ("leaves", long)):
            works.append(
                Work(
                    name=name,
                    function=MODEL,
                    path="/v1/completions",
                    body=json.dumps(body).encode(),
                    streams=name != "whole",
                    leaves=name == "leaves",
                )
            )
        echo = json.dumps({"message": prompt * (index + 1)})
        answer = Answer(text=echo, token_ids=(), prompt_tokens=0, completion_tokens=0)
        path = f"/functions/{ECHO}/invoke"
        works.append(Work(name="echo", function=ECHO, path=path, body=echo.encode(), answer=answer))
        path = f"/functions/{HANDLER}/invoke"
        works.append(Work(name="handler", function=HANDLER, path=path, body=echo.encode()))
    return works


@dataclass(slots=True)
class _Reply(asyncio.Protocol):
    """The answer to one request, as it comes; `leave_at` events it is left."""

    leave_at: int
    done: asyncio.Future[None]
    body: bytearray = field(default_factory=bytearray)
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 0
    complete: bool = False
    bad: str = ""
    parser: httptools.HttpResponseParser = field(init=False)

    def __post_init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.bad = f"no HTTP: {error}"
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._finish()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body += body
        if self.leave_at and self.body.count(b"data: ") >= self.leave_at:
            self._finish()

    def on_message_complete(self) -> None:
        self.complete = True
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class Client:
    """One gateway as one tenant calls it."""

    gateway: int
    url: str
    tenant: str
    key: str

    async def ask(self, request_id: str, work: Work, limit_s: float) -> tuple[Asked, Answer | None]:
        """Ask once; whatever happens is told in the result."""
        asked = Asked(
            request_id=request_id,
            work=work.name,
            function=work.function,
            tenant=self.tenant,
            gateway=self.gateway,
            sent_s=time.monotonic(),
        )
        loop = asyncio.get_running_loop()
        reply = _Reply(_LEAVE_AT if work.leaves else 0, loop.create_future())
        where = urlsplit(self.url)
        answer = None
        try:
            async with asyncio.timeout(limit_s):
                transport, _ = await loop.create_connection(
                    lambda: reply, where.hostname or "", where.port or 80
                )
                try:
                    transport.write(self._bytes(where.netloc, request_id, work))
                    await reply.done
                finally:
                    transport.abort()
        except TimeoutError:
            asked.fate, asked.detail = Fate.HUNG, f"{limit_s:g} s; {bytes(reply.body[-200:])!r}"
        except OSError as error:
            asked.fate, asked.detail = Fate.UNREACHED, error.strerror or type(error).__name__
        else:
            answer = _judge(asked, work, reply)
        asked.ended_s = time.monotonic()
        return asked, answer

    def _bytes(self, host: str, request_id: str, work: Work) -> bytes:
        return (
            f"POST {work.path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {self.key}\r\n"
            f"x-request-id: {request_id}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(work.body)}\r\nconnection: close\r\n\r\n"
        ).encode() + work.body


def _judge(asked: Asked, work: Work, reply: _Reply) -> Answer | None:
    """Note a request's fate; returns what it brought if that was acknowledged."""
    asked.status = reply.status
    body = bytes(reply.body)
    if reply.bad:
        asked.detail = reply.bad
        return None
    if reply.status and reply.status != 200:
        asked.code = _error_code(body)
        if not reply.complete:
            asked.fate = Fate.CUT
        elif reply.status == 503 and reply.headers.get("retry-after", "").isdecimal():
            asked.fate = Fate.REFUSED
        elif asked.code == "function_error":
            asked.fate, asked.detail = Fate.FAILED, body[:200].decode(errors="replace")
        else:
            asked.detail = body[:200].decode(errors="replace")
        return None
    if not reply.complete:
        events = body.count(b"data: ")
        asked.fate = Fate.LEFT if work.leaves and events >= _LEAVE_AT else Fate.CUT
        return None
    try:
        found = _streamed(asked, body) if work.streams else _whole(work, body)
    except (ValueError, LookupError, TypeError) as error:
        asked.detail = f"{error!r} in {body[-300:]!r}"
        return None
    if found is None:
        return None
    asked.fate = Fate.ACKNOWLEDGED
    asked.prompt_tokens, asked.completion_tokens = found.prompt_tokens, found.completion_tokens
    if asked.request_id != reply.headers.get("x-request-id"):
        asked.fate, asked.detail = Fate.WRONG, f"it is called {reply.headers.get('x-request-id')}"
    elif work.answer is not None and found != work.answer:
        asked.fate, asked.detail = Fate.WRONG, _difference(found, work.answer)
    return found


def _difference(found: Answer, wanted: Answer) -> str:
    pairs = enumerate(zip(found.token_ids, wanted.token_ids, strict=False))
    first = next((index for index, (a, b) in pairs if a != b), None)
    return (
        f"another answer: {len(found.token_ids)} tokens of {len(wanted.token_ids)}, first other at {first}, "
        f"usage {found.prompt_tokens}+{found.completion_tokens} of "
        f"{wanted.prompt_tokens}+{wanted.completion_tokens}, text equal: {found.text == wanted.text}"
    )


def _streamed(asked: Asked, body: bytes) -> Answer | None:
    """The pieces of a stream put together; None for one that ended with an error."""
    text, usage = "", None
    ids: list[int] = []
    lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
    for line in lines:
        if line == b"[DONE]":
            break
        event = json.loads(line)
        if "error" in event:
            asked.fate, asked.code = Fate.FAILED, str(event["error"]["code"])
            return None
        for choice in event["choices"]:
            text += choice["text"]
            ids += choice.get("token_ids") or []
        usage = event.get("usage") or usage
    if lines[-1] != b"[DONE]":
        raise ValueError("no [DONE]")
    if usage is None:
        raise ValueError("no usage")
    return _answer(text, ids, usage)


def _whole(work: Work, body: bytes) -> Answer:
    answer = json.loads(body)
    if work.function != MODEL:
        return Answer(text=json.dumps(answer), token_ids=(), prompt_tokens=0, completion_tokens=0)
    (choice,) = answer["choices"]
    return _answer(choice["text"], choice["token_ids"], answer["usage"])


def _answer(text: str, ids: Sequence[int], usage: Mapping[str, Any]) -> Answer:
    return Answer(
        text=text,
        token_ids=tuple(ids),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
    )


def _error_code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return "unknown"


class Load:
    """Clients that ask one thing after another, as several tenants, through every gateway."""

    def __init__(
        self, urls: Sequence[str], keys: Mapping[str, str], *, seed: int, tokens: int, limit_s: float
    ) -> None:
        self.asked: list[Asked] = []
        self.limit_s = limit_s
        self._chance = random.Random(seed)
        self._clients = [
            [Client(index, url, tenant, key) for tenant, key in keys.items()]
            for index, url in enumerate(urls)
        ]
        self._works = catalogue(tokens)
        self._numbers = itertools.count()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._over = False

    async def learn(self) -> None:
        """Find out what every request gives while nothing fails. Raises ValueError."""
        client = self._clients[0][0]
        learnt = []
        for number, work in enumerate(self._works):
            if work.answer is None and not work.leaves:
                asked, answer = await client.ask(f"learn-{number}", work, 60.0)
                if asked.fate is not Fate.ACKNOWLEDGED:
                    raise ValueError(f"without any fault: {asked}")
                self.asked.append(asked)
                work = replace(work, answer=answer)
            learnt.append(work)
        self._works = learnt

    async def run(self, clients: int) -> None:
        """Ask until stopped."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._caller())

    def stop(self) -> None:
        """Let every client end the request that it has under way."""
        self._over = True
        self._flowing.set()

    def hold(self, held: bool) -> None:
        """Begin no request while held."""
        if held:
            self._flowing.clear()
        else:
            self._flowing.set()

    async def probe(self, gateway: int, name: str = "whole") -> bool:
        """Whether a short completion, or another work, through this gateway is good."""
        work = next(work for work in self._works if work.name == name)
        client = self._clients[gateway][0]
        return (await self._ask(client, f"probe-{next(self._numbers)}", work)).fate is Fate.ACKNOWLEDGED

    async def _caller(self) -> None:
        chance = self._chance
        while True:
            await self._flowing.wait()
            if self._over:
                return
            client = chance.choice(chance.choice(self._clients))
            request_id, work = f"load-{next(self._numbers)}", chance.choice(self._works)
            done = await self._ask(client, request_id, work)
            if done.fate in (Fate.ACKNOWLEDGED, Fate.LEFT):
                await asyncio.sleep(chance.uniform(0, _PAUSE_S))
                continue
            await asyncio.sleep(_REFUSED_PAUSE_S)
            if chance.random() < _AGAIN:
                gateway = chance.choice(self._clients)
                again = next(one for one in gateway if one.tenant == client.tenant)
                await self._ask(again, request_id, work)

    async def _ask(self, client: Client, request_id: str, work: Work) -> Asked:
        asked, _ = await client.ask(request_id, work, self.limit_s)
        self.asked.append(asked)
        return asked
