"""A client of a gateway's admin routes, and waits for what they report."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Self

import httpx2

from benchmarks.harness.local_platform import PlatformStateError

PATIENCE_S = 120.0
_POLL_S = 0.05
_CHECK_PAUSE_S = 2.0
USAGE_SUMS = ("requests", "prompt_tokens", "completion_tokens", "billed_gpu_ms", "cost_nanos")


def http_client(url: str, api_key: str, timeout_s: float | None = PATIENCE_S) -> httpx2.AsyncClient:
    """Return a client with the key, without a limit of connections."""
    return httpx2.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {api_key}"},
        limits=httpx2.Limits(max_connections=None),
        timeout=timeout_s,
        trust_env=False,
    )


class AdminClient:
    """The admin side of a running gateway; error statuses raise PlatformStateError."""

    def __init__(self, http: httpx2.AsyncClient, api_key: str = "") -> None:
        self._http = http
        self._key_id = key_id(api_key)

    @classmethod
    def connect(cls, url: str, api_key: str) -> Self:
        """Return a client that owns its connections; use it as a context manager."""
        return cls(http_client(url, api_key), api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    # Nodes and functions.

    async def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self._get("/admin/nodes"))["nodes"]
        return found

    async def function(self, function: str) -> dict[str, Any]:
        found: dict[str, Any] = await self._get(f"/admin/functions/{function}")
        return found

    async def context_length(self, function: str) -> int:
        """Return the tokens of the function's context (0: unlimited)."""
        name, _, version = function.partition(":")
        shown = await self.function(name)
        versions = {str(known["version"]): known for known in shown["history"]}
        if version and version not in versions:
            raise PlatformStateError(f"{name} has no version {version}: it has {', '.join(versions)}")
        return int((versions[version] if version else shown["current"])["context_length"])

    async def states(self, function: str) -> dict[str, str]:
        """Return the states of its instances by node."""
        return {one["node"]: one["state"] for one in (await self.function(function))["instances"]}

    async def pipelines(self, function: str) -> list[dict[str, Any]]:
        live = (await self.function(function))["live"]
        return [] if live is None else list(live["pipelines"])

    async def scale(self, function: str, instances: int, on: Sequence[str] = (), *, wait: bool) -> None:
        request = {"instances": instances, "on": list(on), "wait": wait}
        await self._post(f"/admin/functions/{function}/scale", request)

    async def scale_to_zero(self, function: str) -> None:
        """Scale down until no instance is left."""

        async def no_instances() -> bool:
            if not await self.states(function):
                return True
            await self.scale(function, 0, wait=False)
            return False

        await until(f"{function} has no instances", no_instances)

    async def wait_until_ready(self, function: str, nodes: Collection[str], patience_s: float) -> None:
        """Wait until its instances on these nodes are ready."""

        async def ready() -> bool:
            states = await self.states(function)
            return all(states.get(node) == "ready" for node in nodes)

        await until(f"{', '.join(nodes)} are ready", ready, patience_s)

    async def place_image(self, function: str, on: Sequence[str]) -> None:
        """Have exactly these nodes hold the image, in host memory only."""
        await self.scale_to_zero(function)
        tag = f"{function}:1"

        async def placed() -> bool:
            nodes = await self.nodes()
            holders = {node["id"] for node in nodes if tag in node["tiers"]["host"]}
            on_gpu = {node["id"] for node in nodes if tag in node["tiers"]["gpu"]}
            if holders == set(on) and not on_gpu:
                return True
            if missing := sorted(set(on) - holders):
                await self._post(f"/admin/functions/{function}/warm", {"on": missing})
            elif extra := sorted(holders - set(on)):
                await self._post(f"/admin/functions/{function}/drop", {"tier": "host", "on": extra})
            if on_gpu:
                await self._post(f"/admin/functions/{function}/drop", {"tier": "gpu", "on": []})
            return False

        await until(f"only {', '.join(on)} hold {function}", placed)

    async def last_cast(self, function: str, nodes: Collection[str]) -> dict[str, float]:
        """Return when each of these nodes had all blocks of its latest cast, in Unix seconds."""
        complete_at: dict[str, float] = {}

        async def complete() -> bool:
            cast = (await self._get(f"/admin/casts?function={function}"))["casts"][0]
            parts = [one for one in cast["nodes"] if one["state"] == "complete"]
            complete_at.update({one["node"]: one["updated_at"] for one in parts})
            return complete_at.keys() >= set(nodes)

        await until(f"the latest cast of {function} is complete on {', '.join(nodes)}", complete)
        return complete_at

    async def counter(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        response = await self._http.get("/metrics")
        lines = [line.split() for line in response.text.splitlines() if line.startswith(name)]
        return sum(float(line[-1]) for line in lines)

    # Keys and usage.

    async def create_key(self, tenant: str, name: str) -> str:
        """Create a key, and return it."""
        key: str = (await self._post("/admin/keys", {"tenant": tenant, "name": name}))["key"]
        return key

    async def wait_until_idle(self, patience_s: float) -> None:
        """Wait until no request is in flight."""

        async def idle() -> bool:
            return not (await self._get("/health"))["in_flight"]

        await until("no request is in flight", idle, patience_s)

    async def usage_record(self, request_id: str) -> dict[str, Any] | None:
        """Return the record of a request, if there is one."""
        response = await self._request("GET", f"/admin/usage/show/{request_id}", None, allowed=(200, 404))
        found: dict[str, Any] | None = None if response.status_code == 404 else response.json()
        return found

    async def gpu_time(self, since: float, until: float) -> dict[str, int]:
        """Return the accelerator time of `[since, until)`, as far as it is in the ledger."""
        rows = (await self._get(f"/admin/usage/gpu-time?by=function&since={since!r}&until={until!r}"))["rows"]
        names = ("allocated_ms", "used_ms", "loading_ms", "idle_ms")
        return {name: sum(row[name] for row in rows) for name in names}

    async def usage_sums(self, since: float, until: float) -> dict[str, int]:
        """Return this key's usage in `[since, until)`."""
        query = f"by=key&key={self._key_id}&since={since!r}&until={until!r}"
        rows = (await self._get(f"/admin/usage/report?{query}"))["rows"]
        return {name: sum(row[name] for row in rows) for name in USAGE_SUMS}

    async def reconciliation(self, functions: Sequence[str], wait_s: float) -> str:
        """Return the verdict of the usage check, repeated until it is exact or the time is over.

        The functions are scaled to zero for it: an instance's time is complete in the ledger when it ends.
        """
        until_s = time.monotonic() + wait_s
        for function in functions:
            await self.scale(function.partition(":")[0], 0, wait=True)
        while True:
            verdict = str((await self._get("/admin/usage/check"))["verdict"])
            if verdict == "exact" or time.monotonic() > until_s:
                return verdict
            await asyncio.sleep(_CHECK_PAUSE_S)

    # Requests.

    async def _get(self, path: str) -> Any:
        return (await self._request("GET", path, None)).json()

    async def _post(self, path: str, body: dict[str, object]) -> Any:
        response = await self._request("POST", path, body)
        if '"error"' in response.text:  # in a stream of progress lines
            raise PlatformStateError(f"{path}: {response.text[:300]}")
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json else None

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None,
        allowed: Collection[int] = range(200, 300),
    ) -> httpx2.Response:
        """Send the request, again while the platform is unavailable."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                response = await self._http.request(method, path, json=body)
            except httpx2.HTTPError as error:
                reason = error or type(error).__name__
                raise PlatformStateError(f"{self._http.base_url}{path}: {reason}") from error
            if response.status_code in allowed:
                return response
            if response.status_code != 503 or time.monotonic() > deadline_s:
                raise PlatformStateError(f"{path}: {response.status_code} {response.text[:300]}")
            await asyncio.sleep(_POLL_S)


def key_id(api_key: str) -> str:
    """Return the id in `hc_<id>_<secret>`; the secret may contain underscores."""
    return api_key.partition("_")[2].partition("_")[0]


async def until(what: str, holds: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
    """Poll until a condition holds that only the platform's interfaces show. Raises PlatformStateError."""
    deadline_s = time.monotonic() + patience_s
    while not await holds():
        if time.monotonic() > deadline_s:
            raise PlatformStateError(f"timed out after {patience_s:g} s waiting until {what}")
        await asyncio.sleep(_POLL_S)
