"""Mixed load whose clients record every outcome: streams, whole responses, handlers, disconnects."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from benchmarks.harness.http_exchange import HttpEndpoint, ResponseReader, error_code

MODEL, ECHO, HANDLER = "coder", "echo", "counter"
_PROMPTS = ("def add(a, b):", "class Tree:", "import os\n", "for i in range(", "# Sort a list", "x = [")
_LEAVE_AT = 3  # events until disconnect
_PAUSE_S = 0.08  # maximum pause between two requests of a client
_REFUSED_PAUSE_S = 0.25
# Balancers have such a limit: attempts to reach a container that has just been removed are never answered.
CONNECT_S = 5.0
_RETRY_SHARE = 0.3  # of failed requests, retried under their id


class RequestFate(StrEnum):
    """How a request ended for its client."""

    ACKNOWLEDGED = "acknowledged"  # its last byte arrived
    LEFT = "left"  # the client disconnected as planned
    REFUSED = "refused"  # 503 with Retry-After
    FAILED = "failed"  # an error after the first byte, or of the function itself
    CUT = "cut"  # the connection broke
    UNREACHED = "unreached"  # no connection
    HUNG = "hung"  # timed out
    WRONG = "wrong"  # anything else; see `detail`


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAnswer:
    """The correct response to a request."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTemplate:
    """One kind of request; `answer` is its fault-free response, once known."""

    name: str
    function: str
    path: str
    body: bytes
    streams: bool = False
    leaves: bool = False
    answer: ExpectedAnswer | None = None


@dataclass(slots=True, kw_only=True)
class IssuedRequest:
    """One request and its outcome; times are from `time.monotonic`."""

    request_id: str
    work: str
    function: str
    tenant: str
    gateway: int
    sent_s: float
    ended_s: float = 0.0
    fate: RequestFate = RequestFate.WRONG
    status: int = 0
    code: str = ""
    detail: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __str__(self) -> str:
        details = " ".join(str(part) for part in (self.status or "", self.code, self.detail) if part)
        return f"{self.request_id} ({self.work}, gateway {self.gateway}) {self.fate}: {details}"


def request_templates(tokens: int) -> list[RequestTemplate]:
    """Return greedy and seeded streams, whole responses, disconnecting clients, echoes and a handler."""
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
                RequestTemplate(
                    name=name,
                    function=MODEL,
                    path="/v1/completions",
                    body=json.dumps(body).encode(),
                    streams=name != "whole",
                    leaves=name == "leaves",
                )
            )
        echo = json.dumps({"message": prompt * (index + 1)})
        answer = ExpectedAnswer(text=echo, token_ids=(), prompt_tokens=0, completion_tokens=0)
        path = f"/functions/{ECHO}/invoke"
        works.append(
            RequestTemplate(name="echo", function=ECHO, path=path, body=echo.encode(), answer=answer)
        )
        path = f"/functions/{HANDLER}/invoke"
        works.append(RequestTemplate(name="handler", function=HANDLER, path=path, body=echo.encode()))
    return works


@dataclass(slots=True)
class _WholeResponse(ResponseReader):
    """Receives one response; disconnects after `leave_at` events."""

    leave_at: int = 0
    body: bytearray = field(default_factory=bytearray)
    headers: dict[str, str] = field(default_factory=dict)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body
        if self.leave_at and self.body.count(b"data: ") >= self.leave_at:
            self.finish()


@dataclass(frozen=True, slots=True)
class TenantClient:
    """One tenant's client of one gateway, which gives up a connection that takes longer than `connect_s`."""

    gateway: int
    url: str
    tenant: str
    key: str
    connect_s: float = CONNECT_S

    async def ask(
        self, request_id: str, work: RequestTemplate, limit_s: float
    ) -> tuple[IssuedRequest, ExpectedAnswer | None]:
        """Send once; every outcome is reported in the result."""
        issued = IssuedRequest(
            request_id=request_id,
            work=work.name,
            function=work.function,
            tenant=self.tenant,
            gateway=self.gateway,
            sent_s=time.monotonic(),
        )
        reply = _WholeResponse(leave_at=_LEAVE_AT if work.leaves else 0)
        endpoint = HttpEndpoint.of(self.url, self.key)
        answer = None
        try:
            request = endpoint.request(request_id, work.body, work.path)
            await reply.read(endpoint, request, limit_s, self.connect_s)
        except TimeoutError:
            if reply.connected:
                issued.fate = RequestFate.HUNG
                issued.detail = f"{limit_s:g} s for a response; {bytes(reply.body[-200:])!r}"
            else:
                issued.fate, issued.detail = RequestFate.UNREACHED, f"no connection in {self.connect_s:g} s"
        except OSError as error:
            issued.fate, issued.detail = RequestFate.UNREACHED, error.strerror or type(error).__name__
        else:
            answer = _classify(issued, work, reply)
        issued.ended_s = time.monotonic()
        return issued, answer


def _classify(issued: IssuedRequest, work: RequestTemplate, reply: _WholeResponse) -> ExpectedAnswer | None:
    """Set a request's fate; return its content if it was acknowledged."""
    issued.status = reply.status
    body = bytes(reply.body)
    if reply.failure:
        issued.detail = reply.failure
        return None
    if reply.status and reply.status != 200:
        issued.code = error_code(body)
        if not reply.complete:
            issued.fate = RequestFate.CUT
        elif reply.status == 503 and reply.headers.get("retry-after", "").isdecimal():
            issued.fate = RequestFate.REFUSED
        elif issued.code == "function_error":
            issued.fate, issued.detail = RequestFate.FAILED, body[:200].decode(errors="replace")
        else:
            issued.detail = body[:200].decode(errors="replace")
        return None
    if not reply.complete:
        events = body.count(b"data: ")
        issued.fate = RequestFate.LEFT if work.leaves and events >= _LEAVE_AT else RequestFate.CUT
        return None
    try:
        found = _streamed(issued, body) if work.streams else _whole(work, body)
    except (ValueError, LookupError, TypeError) as error:
        issued.detail = f"{error!r} in {body[-300:]!r}"
        return None
    if found is None:
        return None
    issued.fate = RequestFate.ACKNOWLEDGED
    issued.prompt_tokens, issued.completion_tokens = found.prompt_tokens, found.completion_tokens
    if issued.request_id != reply.headers.get("x-request-id"):
        issued.fate, issued.detail = (
            RequestFate.WRONG,
            f"the response has x-request-id {reply.headers.get('x-request-id')}",
        )
    elif work.answer is not None and found != work.answer:
        issued.fate, issued.detail = RequestFate.WRONG, _difference(found, work.answer)
    return found


def _difference(found: ExpectedAnswer, expected: ExpectedAnswer) -> str:
    pairs = enumerate(zip(found.token_ids, expected.token_ids, strict=False))
    first = next((index for index, (a, b) in pairs if a != b), None)
    return (
        f"different response: {len(found.token_ids)} tokens of {len(expected.token_ids)}, "
        f"first difference at {first}, "
        f"usage {found.prompt_tokens}+{found.completion_tokens} of "
        f"{expected.prompt_tokens}+{expected.completion_tokens}, text equal: {found.text == expected.text}"
    )


def _streamed(issued: IssuedRequest, body: bytes) -> ExpectedAnswer | None:
    """Join the events of a stream; return None if it ended with an error."""
    text, usage = "", None
    ids: list[int] = []
    lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
    for line in lines:
        if line == b"[DONE]":
            break
        event = json.loads(line)
        if "error" in event:
            issued.fate, issued.code = RequestFate.FAILED, str(event["error"]["code"])
            issued.detail = str(event["error"]["message"])
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


def _whole(work: RequestTemplate, body: bytes) -> ExpectedAnswer:
    answer = json.loads(body)
    if work.function != MODEL:
        return ExpectedAnswer(text=json.dumps(answer), token_ids=(), prompt_tokens=0, completion_tokens=0)
    (choice,) = answer["choices"]
    return _answer(choice["text"], choice["token_ids"], answer["usage"])


def _answer(text: str, ids: Sequence[int], usage: Mapping[str, Any]) -> ExpectedAnswer:
    return ExpectedAnswer(
        text=text,
        token_ids=tuple(ids),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
    )


class ChaosLoad:
    """Clients of several tenants that send one request after another, through every gateway."""

    def __init__(
        self, urls: Sequence[str], keys: Mapping[str, str], *, seed: int, tokens: int, limit_s: float
    ) -> None:
        self.issued: list[IssuedRequest] = []
        self.limit_s = limit_s
        self._chance = random.Random(seed)
        self._clients = [
            [TenantClient(index, url, tenant, key) for tenant, key in keys.items()]
            for index, url in enumerate(urls)
        ]
        self._works = request_templates(tokens)
        self._numbers = itertools.count()
        self._running = asyncio.Event()
        self._running.set()
        self._over = False

    async def record_expected(self) -> None:
        """Record the fault-free response of every request. Raises ValueError."""
        client = self._clients[0][0]
        recorded = []
        for number, work in enumerate(self._works):
            if work.answer is None and not work.leaves:
                issued, answer = await client.ask(f"expected-{number}", work, 60.0)
                if issued.fate is not RequestFate.ACKNOWLEDGED:
                    raise ValueError(f"the fault-free request failed: {issued}")
                self.issued.append(issued)
                work = replace(work, answer=answer)
            recorded.append(work)
        self._works = recorded

    async def run(self, clients: int) -> None:
        """Send requests until stopped."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._run_client())

    def stop(self) -> None:
        """Let every client finish its current request."""
        self._over = True
        self._running.set()

    async def probe(self, gateway: int, name: str = "whole") -> bool:
        """Return whether a short request through this gateway gets a correct response."""
        work = next(work for work in self._works if work.name == name)
        client = self._clients[gateway][0]
        return (
            await self._ask(client, f"probe-{next(self._numbers)}", work)
        ).fate is RequestFate.ACKNOWLEDGED

    async def _run_client(self) -> None:
        chance = self._chance
        while True:
            await self._running.wait()
            if self._over:
                return
            client = chance.choice(chance.choice(self._clients))
            request_id, work = f"load-{next(self._numbers)}", chance.choice(self._works)
            done = await self._ask(client, request_id, work)
            if done.fate in (RequestFate.ACKNOWLEDGED, RequestFate.LEFT):
                await asyncio.sleep(chance.uniform(0, _PAUSE_S))
                continue
            await asyncio.sleep(_REFUSED_PAUSE_S)
            if chance.random() < _RETRY_SHARE:
                gateway = chance.choice(self._clients)
                again = next(one for one in gateway if one.tenant == client.tenant)
                await self._ask(again, request_id, work)

    async def _ask(self, client: TenantClient, request_id: str, work: RequestTemplate) -> IssuedRequest:
        issued, _ = await client.ask(request_id, work, self.limit_s)
        self.issued.append(issued)
        return issued
