"""The response of an encoder's forward passes."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.billing.request_record import prompt_tokens
from gateway.core.request_context import RequestContext
from gateway.http.disconnect import CancelOnDisconnect
from gateway.http.responses import JSON_TYPE, Headers, send_body
from gateway.requests.billed_request import BilledRequest, run_all
from gateway.requests.compute import Vector, rows, run_compute
from gateway.requests.services import Services
from gateway.tenants.cost_estimates import WorkBound
from registry.messages.node import Compute
from registry.records.function import FunctionVersion

_BATCH = 32  # texts of one call; a longer list is spread over instances
_MAX_CONCURRENT_CALLS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPlan:
    """The forward passes of a request, whose ids are set as they run, and the array that they return."""

    context: RequestContext
    version: FunctionVersion
    works: Sequence[Compute]
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderAnswer:
    """The body of a response, with the headers that belong to it."""

    body: bytes
    headers: Headers = ()
    media_type: bytes = JSON_TYPE


Answer = Callable[[Sequence[Vector], int], Awaitable[EncoderAnswer]]
"""Returns the response to vectors, in the order of the inputs, of that number of tokens."""


class EncoderReply:
    """The response to vectors, once all of them are there."""

    def __init__(self, services: Services, plan: EncoderPlan, answer: Answer) -> None:
        self._services = services
        self._plan = plan
        self._answer = answer

    @property
    def bound(self) -> WorkBound:
        """What it computes at most."""
        works = self._plan.works
        tokens = sum(len(ids) for work in works for ids in work.token_ids)
        return WorkBound(calls=len(works), prompt_tokens=tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plan = self._plan
        vectors: dict[int, list[Vector]] = {}
        with CancelOnDisconnect(scope) as guard:
            async with BilledRequest(self._services, plan.context, plan.version, self.bound) as job:

                async def run(index: int) -> None:
                    work = msgspec.structs.replace(plan.works[index], request_id=job.next_call_id())
                    vectors[index] = rows(await run_compute(job, work), plan.output)

                numbers = range(len(plan.works))
                await run_all(numbers, run, at_once=_MAX_CONCURRENT_CALLS)
                in_order = [vector for index in numbers for vector in vectors[index]]
                answer = await self._answer(in_order, prompt_tokens(job.runs))
                await job.complete()
            guard.disarm()
            headers = [*job.headers(final=True), *answer.headers]
            await send_body(send, answer.body, headers=headers, media_type=answer.media_type)


def embed_works(inputs: Sequence[tuple[int, ...]], pooling: str) -> list[Compute]:
    """Return the forward passes that make vectors of texts."""
    return [
        Compute(
            request_id="",
            instance_id="",
            kind="embed",
            token_ids=tuple(inputs[start : start + _BATCH]),
            pooling=pooling,
        )
        for start in range(0, len(inputs), _BATCH)
    ]
