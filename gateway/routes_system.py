"""Probes, metrics and the API's description: open to all, and cheap."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.drain import Phase
from gateway.metrics import CONTENT_TYPE
from gateway.openapi import document
from gateway.responses import encoded, json_response
from gateway.services import Services
from registry.instance import InstanceState
from registry.node import NodeState


class SystemRoutes:
    """/livez, /readyz, /health, /metrics and /openapi.json."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def livez(self, request: Request) -> Response:
        return encoded({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        """200 while this gateway takes requests: the state answers, the nodes that are expected have
        joined, and it is not draining."""
        reasons = self._reasons()
        if reasons:
            return encoded({"status": "not ready", "reasons": reasons}, status=503)
        return encoded({"status": "ready"})

    async def health(self, request: Request) -> Response:
        """A summary; 503 with the same body while not ready."""
        services, view = self._services, self._services.cluster.view()
        reasons = self._reasons()
        states = [instance.state for instance in view.instances]
        body: dict[str, object] = {
            "status": "ready" if not reasons else "not ready",
            "reasons": reasons,
            "phase": services.gate.phase,
            "in_flight": services.gate.in_flight,
            "state": "alive" if services.pulse.alive else "silent",
            "nodes": len(view.nodes),
            "functions": len(view.functions),
            "instances": {str(state): states.count(state) for state in sorted(set(states))},
            "ready_instances": states.count(InstanceState.READY),
        }
        rates = [up.record.link_rate_bytes_s for up in view.nodes if up.record.link_rate_bytes_s]
        if rates:
            body["link_rate_bytes_s"] = min(rates)  # an experiment: transfers are slower than the links
        return encoded(body, status=503 if reasons else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(self._services.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        return json_response(document())

    def _reasons(self) -> list[str]:
        services = self._services
        reasons = []
        if services.gate.phase is Phase.DRAINING:
            reasons.append("draining")
        if not services.pulse.alive:
            reasons.append("the registry does not answer")
        expected = services.settings.expect_nodes
        ready = sum(up.record.state is NodeState.READY for up in services.cluster.view().nodes)
        if ready < expected:
            reasons.append(f"{ready} of {expected} nodes have joined")
        return reasons
