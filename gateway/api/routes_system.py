"""Probes, metrics and the API's description, which need no key."""

import asyncio
from collections.abc import Callable
from functools import cache

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.http.drain import ServingPhase
from gateway.http.metrics import CONTENT_TYPE
from gateway.http.responses import json_response, raw_json
from gateway.requests.services import Services
from gateway.schemas.answers import Health, HealthStatus, Liveness, Readiness, ServiceIndex
from registry.errors import RegistryError
from registry.records.instance import InstanceState
from registry.records.node import NodeState

_COUNTS_TIMEOUT_S = 1.0  # of what a scrape reads from Redis


class SystemRoutes:
    """The handlers of /, /livez, /readyz, /health, /metrics and /openapi.json."""

    def __init__(self, services: Services, document: Callable[[], bytes]) -> None:
        self._services = services
        self._document = cache(document)

    async def index(self, request: Request) -> ServiceIndex | Response:
        """Return what this service is; a browser is sent on to the console."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("ui", status_code=303)
        return ServiceIndex()

    async def livez(self, request: Request) -> Liveness:
        """Return 200 while the process responds."""
        return Liveness()

    async def readyz(self, request: Request) -> Response:
        """Return 200 while this gateway accepts requests, else 503 with the reasons.

        It is ready when Redis is available, the expected nodes have joined, and it is not draining.
        """
        reasons = self.reasons()
        if reasons:
            return json_response(Readiness(status="not ready", reasons=reasons), status=503)
        return json_response(Readiness(status="ready"))

    async def readyz_status(self, request: Request) -> Response:
        """Return of the readiness what a stranger may see."""
        if self.reasons():
            return json_response(Readiness(status="not ready"), status=503)
        return json_response(Readiness(status="ready"))

    async def health(self, request: Request) -> Response:
        """Return a summary; 503 with the same body while not ready."""
        services, view = self._services, self._services.cluster.view()
        reasons = self.reasons()
        states = [instance.state for instance in view.instances if instance.takes_calls]
        rates = [up.record.link_rate_bytes_s for up in view.nodes if up.record.link_rate_bytes_s]
        body = Health(
            status="ready" if not reasons else "not ready",
            reasons=reasons,
            phase=services.limiter.phase,
            in_flight=services.limiter.in_flight,
            state="alive" if services.health.alive else "silent",
            state_reason=services.health.reason,
            nodes=len(view.nodes),
            functions=len(view.functions),
            instances={str(state): states.count(state) for state in sorted(set(states))},
            ready_instances=states.count(InstanceState.READY),
            link_rate_bytes_s=min(rates) if rates else UNSET,
        )
        return json_response(body, status=503 if reasons else 200)

    async def status(self, request: Request) -> Response:
        """Return of the summary what a stranger may see."""
        reasons = self.reasons()
        status = HealthStatus(
            status="ready" if not reasons else "not ready",
            state="alive" if self._services.health.alive else "silent",
        )
        return json_response(status, status=503 if reasons else 200)

    async def metrics(self, request: Request) -> Response:
        """Return the Prometheus metrics; without those of jobs while Redis is unavailable."""
        metrics = self._services.metrics
        try:
            async with asyncio.timeout(_COUNTS_TIMEOUT_S):
                metrics.jobs.counts = await self._services.state.job_counts()
        except (TimeoutError, RegistryError):
            metrics.jobs.counts = None
        return Response(self._services.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        """Return the OpenAPI document."""
        return raw_json(self._document())

    def reasons(self) -> list[str]:
        """Return why this gateway is not ready, nothing if it is."""
        services = self._services
        reasons = []
        if services.limiter.phase is ServingPhase.DRAINING:
            reasons.append("draining")
        if not services.health.alive:
            reasons.append(f"Redis is unavailable: {services.health.reason}")
        expected = services.settings.expect_nodes
        ready = sum(up.record.state is NodeState.READY for up in services.cluster.view().nodes)
        if ready < expected:
            reasons.append(f"{ready} of {expected} nodes have joined")
        return reasons
