"""Requests to vLLM's OpenAI server on its Unix socket."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from invoker.engine.contract import EngineError, NewSequence, TokenOutput
from invoker.vllm.events import DONE, BadAnswer, EventSplitter, ServerRefused, decode_event, refused
from registry.messages.forward import cache_salt
from registry.messages.trace import TraceContext

MAX_BODY_BYTES = 64 << 20
_CONNECT_S = 10.0


class ServerLost(EngineError):
    """The server has ended, or its answer was cut off: another instance can continue."""

    code = "pipeline_lost"


class VllmClient:
    """A client of one server. Its methods raise ServerLost.

    `unreachable` is set once a server that was ready takes no connections: it has ended, though perhaps not
    all that it started.
    """

    def __init__(self, socket: Path, name: str, *, max_connections: int) -> None:
        self.name = name
        self.unreachable = asyncio.Event()
        limits = httpx2.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        self._http = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=str(socket), limits=limits, trust_env=False),
            base_url="http://vllm",
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            trust_env=False,
        )

    def __repr__(self) -> str:
        return f"<VllmClient {self.name}>"

    async def aclose(self) -> None:
        await self._http.aclose()

    async def is_ready(self) -> bool:
        """Return whether the server answers and its engine works."""
        try:
            return (await self._http.get("/health")).status_code == 200
        except httpx2.HTTPError:
            return False

    @asynccontextmanager
    async def post(
        self, path: str, body: bytes, trace: TraceContext | None = None
    ) -> AsyncGenerator[httpx2.Response, None]:
        """Send a JSON body; yield the response, whose body is read by the caller.

        A server that exports traces itself continues `trace`.
        """
        if self._http.is_closed:  # with its instance, which the call has outlived
            raise ServerLost("vLLM's server was stopped")
        try:
            async with self._http.stream("POST", path, content=body, headers=_headers(trace)) as response:
                yield response
        except httpx2.HTTPError as error:
            if _takes_no_connections(error):
                self.unreachable.set()
            raise ServerLost(f"vLLM's server was lost: {type(error).__name__}: {error}") from error

    async def generate(self, sequence: NewSequence) -> AsyncGenerator[list[TokenOutput], None]:
        """Yield the tokens of a sequence as they arrive, those of one event together.

        The last has a `finish_reason`. Raises ServerRefused.
        """
        body = msgspec.json.encode(completion_request(sequence, self.name))
        async with self.post("/v1/completions", body, sequence.trace) as response:
            if response.status_code != 200:
                raise refused(response.status_code, await read_body(response))
            splitter, is_over = EventSplitter(), False
            async for data in response.aiter_bytes():
                for event in splitter.feed(data):
                    if event == DONE:
                        if is_over:
                            return
                        raise ServerLost("vLLM's server ended a stream without a finish reason")
                    if outputs := token_outputs(event, sequence.request_id):
                        is_over = bool(outputs[-1].finish_reason)
                        yield outputs
            raise ServerLost("vLLM's server ended a stream early")


def _headers(trace: TraceContext | None) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if trace is not None:
        headers["traceparent"] = trace.parent
        if trace.state:
            headers["tracestate"] = trace.state
    return headers


def _takes_no_connections(error: BaseException | None) -> bool:
    """Return whether the server's end of the socket is the cause: this process may lack descriptors."""
    while error is not None:
        if isinstance(error, (ConnectionRefusedError, FileNotFoundError)):
            return True
        error = error.__cause__ or error.__context__
    return False


async def read_body(response: httpx2.Response) -> bytes:
    """Read a whole body. Raises BadAnswer for one beyond MAX_BODY_BYTES."""
    body = bytearray()
    async for data in response.aiter_bytes():
        body += data
        if len(body) > MAX_BODY_BYTES:
            raise BadAnswer(f"a body of more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def completion_request(sequence: NewSequence, model: str) -> dict[str, Any]:
    """Return the body that continues a sequence from its token ids.

    Raises ServerRefused for what vLLM would not continue as if undisturbed: its penalties count what it
    generated itself, grammars are its own. Requests with those pass through to its server, as logprobs do.
    """
    sampling = sequence.sampling
    if sampling.counts_tokens or sampling.logprobs is not None:
        raise ServerRefused(400, "penalties, grammars and logprobs need a request to vLLM's own server")
    generated = len(sequence.generated_ids)
    body: dict[str, Any] = {
        "model": model,
        "prompt": [*sequence.prompt_ids, *sequence.generated_ids],
        "request_id": sequence.request_id,
        "cache_salt": cache_salt(sequence.tenant),
        "stream": True,
        "return_token_ids": True,
        "max_tokens": sampling.max_tokens - generated,
        "min_tokens": max(0, sampling.min_tokens - generated),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        # Which tokens end it is decided here, as by the native engine.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.ending_token_ids),
        "skip_special_tokens": False,
    }
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.allowed_token_ids:
        body["allowed_token_ids"] = list(sampling.allowed_token_ids)
    return body


def token_outputs(event: bytes, request_id: str) -> list[TokenOutput]:
    """Return the tokens of one event of a completion. Raises BadAnswer, ServerRefused."""
    chunk = decode_event(event)
    try:
        choice = chunk["choices"][0]
        ids: list[int | None] = [int(token) for token in choice.get("token_ids") or ()]
        reason = str(choice.get("finish_reason") or "")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"an event that is no completion: {error!r}") from error
    if reason and not ids:
        ids = [None]
    last = len(ids) - 1
    return [
        TokenOutput(
            request_id=request_id,
            token_id=token,
            logprob=None,
            finish_reason=reason if place == last else "",
            work=0 if token is None else 1,
        )
        for place, token in enumerate(ids)
    ]
