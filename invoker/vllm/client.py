"""Requests to vLLM's OpenAI server on its Unix socket."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from invoker.engine.contract import EngineError, NewSequence, TokenOutput
from invoker.vllm.events import BadAnswer, EventSplitter
from registry.messages.sampling import Sampling, TokenLogprob

MAX_BODY_BYTES = 64 << 20
_CONNECT_S = 10.0
_ID_PREFIX = "token_id:"


class ServerLost(EngineError):
    """The server has ended, or its answer was cut off: another instance can continue."""

    code = "pipeline_lost"


class ServerRefused(EngineError):
    """The server answered with an error. `status` is its HTTP status."""

    code = "bad_request"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        if status >= 500:
            self.code = "internal"


class VllmClient:
    """A client of one server. Its methods raise ServerLost."""

    def __init__(self, socket: Path, name: str, *, max_connections: int) -> None:
        self.name = name
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
    async def post(self, path: str, body: bytes) -> AsyncGenerator[httpx2.Response, None]:
        """Send a JSON body; yield the response, whose body is read by the caller."""
        try:
            async with self._http.stream(
                "POST", path, content=body, headers={"content-type": "application/json"}
            ) as response:
                yield response
        except httpx2.HTTPError as error:
            raise ServerLost(f"vLLM's server was lost: {type(error).__name__}: {error}") from error

    async def generate(self, sequence: NewSequence) -> AsyncGenerator[list[TokenOutput], None]:
        """Yield the tokens of a sequence as they arrive, those of one event together.

        The last has a `finish_reason`. Raises ServerRefused.
        """
        body = msgspec.json.encode(completion_request(sequence, self.name))
        async with self.post("/v1/completions", body) as response:
            if response.status_code != 200:
                raise refused(response.status_code, await read_body(response))
            splitter = EventSplitter()
            async for data in response.aiter_bytes():
                for event in splitter.feed(data):
                    if event == b"[DONE]":
                        return
                    if outputs := token_outputs(event, sequence.request_id):
                        yield outputs
            raise ServerLost("vLLM's server ended a stream early")


async def read_body(response: httpx2.Response) -> bytes:
    """Read a whole body. Raises BadAnswer for one beyond MAX_BODY_BYTES."""
    body = bytearray()
    async for data in response.aiter_bytes():
        body += data
        if len(body) > MAX_BODY_BYTES:
            raise BadAnswer(f"a body of more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def refused(status: int, body: bytes) -> ServerRefused:
    """Return the error of a response with that status."""
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        decoded = None
    error = decoded.get("error") if isinstance(decoded, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return ServerRefused(status, str(message or f"vLLM answered with status {status}")[:2000])


def completion_request(sequence: NewSequence, model: str) -> dict[str, Any]:
    """Return the body that continues a sequence from its token ids."""
    sampling = sequence.sampling
    generated = len(sequence.generated_ids)
    body: dict[str, Any] = {
        "model": model,
        "prompt": [*sequence.prompt_ids, *sequence.generated_ids],
        "request_id": sequence.request_id,
        "stream": True,
        "return_token_ids": True,
        "max_tokens": sampling.max_tokens - generated,
        "min_tokens": max(0, sampling.min_tokens - generated),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        # Which tokens end it is decided here, as by the native engine.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.ending_token_ids),
        "skip_special_tokens": False,
    }
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.allowed_token_ids:
        body["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    return body


def token_outputs(event: bytes, request_id: str) -> list[TokenOutput]:
    """Return the tokens of one event of a completion. Raises BadAnswer, ServerRefused."""
    try:
        chunk = msgspec.json.decode(event)
        if "error" in chunk:
            raise ServerRefused(500, str(chunk["error"].get("message", "vLLM failed"))[:2000])
        choice = chunk["choices"][0]
        ids = [int(token) for token in choice.get("token_ids") or ()]
        logprobs = _logprobs(choice.get("logprobs"), len(ids))
        reason = str(choice.get("finish_reason") or "")
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadAnswer(f"an event that is no completion: {error!r}") from error
    outputs = [
        TokenOutput(request_id=request_id, token_id=token, logprob=logprob, finish_reason="", work=1)
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    if reason:
        end = outputs.pop() if outputs else None
        outputs.append(
            TokenOutput(
                request_id=request_id,
                token_id=end.token_id if end else None,
                logprob=end.logprob if end else None,
                finish_reason=reason,
                work=1 if end else 0,
            )
        )
    return outputs


def _logprobs(given: Any, count: int) -> list[TokenLogprob | None]:
    if given is None:
        return [None] * count
    found: list[TokenLogprob | None] = []
    for logprob, top in zip(given["token_logprobs"], given["top_logprobs"], strict=True):
        pairs = sorted(((_token_id(name), value) for name, value in (top or {}).items()), key=lambda x: -x[1])
        found.append(TokenLogprob(logprob, tuple(pairs)))
    return found


def _token_id(name: str) -> int:
    return int(name.removeprefix(_ID_PREFIX))


def sampling_is_portable(sampling: Sampling) -> bool:
    """Return whether a sequence continues elsewhere as if undisturbed, from its tokens alone.

    Penalties of vLLM count what it generated, not what came before a move; grammars are its own.
    """
    return not sampling.counts_tokens
