"""Whether a ledger holds what a client saw: one record a request, the right tokens, the right sums."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import httpx2

from benchmarks.stream_client import Streamed

_AT_ONCE = 8
_SUMS = ("requests", "prompt_tokens", "completion_tokens", "billed_gpu_ms", "cost_nanos")
_CHECK_PAUSE_S = 2.0


class Platform:
    """The admin side of a running gateway. Answers that are none become ValueError."""

    def __init__(self, url: str, api_key: str) -> None:
        self._key_id = key_id(api_key)
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(120.0),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def context_length(self, function: str) -> int:
        """How many tokens the function's context holds (0: no bound)."""
        name, _, version = function.partition(":")
        shown = await self._get(f"/admin/functions/{name}")
        versions = {str(known["version"]): known for known in shown["history"]}
        if version and version not in versions:
            raise ValueError(f"there is no {function}")
        return int((versions[version] if version else shown["current"])["context_length"])

    async def record(self, request_id: str) -> dict[str, Any] | None:
        """The record of a request, if there is one."""
        response = await self._request(f"/admin/usage/show/{request_id}")
        return None if response.status_code == 404 else self._body(response)

    async def sums(self, since: float, until: float) -> dict[str, int]:
        """What this key used in `[since, until)`."""
        query = {"by": "key", "key": self._key_id, "since": since, "until": until}
        rows = (await self._get("/admin/usage/report", query))["rows"]
        return {name: sum(row[name] for row in rows) for name in _SUMS}

    async def conservation(self, function: str, wait_s: float) -> str:
        """The verdict of the usage check, asked for until it is exact or the time is over. The function is
        sent to sleep for it: all time of an instance is in the ledger when it ends."""
        until_s = time.monotonic() + wait_s
        name = function.partition(":")[0]
        self._body(await self._request(f"/admin/functions/{name}/scale", json={"instances": 0, "wait": True}))
        while True:
            verdict = str((await self._get("/admin/usage/check"))["verdict"])
            if verdict == "exact" or time.monotonic() > until_s:
                return verdict
            await asyncio.sleep(_CHECK_PAUSE_S)

    async def _get(self, path: str, query: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._body(await self._request(path, query))

    async def _request(
        self, path: str, query: dict[str, Any] | None = None, json: dict[str, Any] | None = None
    ) -> httpx2.Response:
        try:
            return await self._http.request("GET" if json is None else "POST", path, params=query, json=json)
        except httpx2.HTTPError as error:
            raise ValueError(f"{self._http.base_url}: {error or type(error).__name__}") from error

    def _body(self, response: httpx2.Response) -> dict[str, Any]:
        if response.status_code != 200:
            raise ValueError(f"{response.url.path} answers {response.status_code}: {response.text[:300]}")
        body: dict[str, Any] = response.json()
        return body


def key_id(api_key: str) -> str:
    """The id in `hc_<id>_<secret>`; the secret may have more underscores."""
    return api_key.partition("_")[2].partition("_")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCheck:
    """What the ledger says of requests that a client made, as counts of what is wrong.

    `conservation` is the verdict on all accelerator time; `open` means that it cannot be told yet.
    """

    records: int
    missing: int
    wrong_tokens: int
    wrong_status: int
    sums_equal: bool
    conservation: str

    @property
    def ok(self) -> bool | None:
        """None: nothing is wrong so far, but there is time of live instances that is not settled."""
        right = not (self.missing or self.wrong_tokens or self.wrong_status) and self.sums_equal
        if not right or self.conservation == "wrong":
            return False
        return True if self.conservation == "exact" else None

    def record(self) -> dict[str, Any]:
        return asdict(self)


async def check_ledger(
    platform: Platform, function: str, finished: Sequence[Streamed], *, wait_s: float
) -> LedgerCheck:
    """Look every request up, and compare sums; nobody else may use the key meanwhile."""
    turn = asyncio.Semaphore(_AT_ONCE)

    async def look_up(done: Streamed) -> dict[str, Any] | None:
        async with turn:
            return await platform.record(done.request_id)

    found = await asyncio.gather(*(look_up(done) for done in finished))
    there = [record for record in found if record is not None]
    good = [(done, record) for done, record in zip(finished, found, strict=True) if not done.failure]
    return LedgerCheck(
        records=len(there),
        missing=sum(record is None for _, record in good),
        wrong_tokens=sum(
            (record["prompt_tokens"], record["completion_tokens"])
            != (done.prompt_tokens, done.completion_tokens)
            for done, record in good
            if record is not None
        ),
        wrong_status=sum(record["status"] != "ok" for _, record in good if record is not None),
        sums_equal=await _sums_equal(platform, there),
        conservation=await platform.conservation(function, wait_s),
    )


async def _sums_equal(platform: Platform, records: Sequence[dict[str, Any]]) -> bool:
    """Whether the report over the time of these records holds them, each once, and nothing else."""
    if not records:
        return True
    ends = [record["ended_at"] for record in records]
    expected = {name: sum(record.get(name, 1) for record in records) for name in _SUMS}
    return await platform.sums(min(ends), max(ends) + 1e-3) == expected
