"""With a metrics port, strangers on the port of the clients learn no names; the other is always served."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from starlette.responses import PlainTextResponse

from gateway.api.app import make_metrics_app
from gateway.http.metrics_listener import metrics_listener
from registry.errors import InvalidRecord
from registry.records.function import FunctionTask
from tests.fixtures.gateway_http import Gateway, gateway


@asynccontextmanager
async def with_metrics_port(
    *, head_s: float = 30.0, **more: Any
) -> AsyncIterator[tuple[Gateway, httpx2.AsyncClient]]:
    """Yield a gateway and a client of its metrics port, without a key."""
    async with gateway(metrics_port=0, **more) as gw:
        app = make_metrics_app(gw.services, gw.collector)
        async with (
            metrics_listener(app, "127.0.0.1", 0, head_s=head_s) as port,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http,
        ):
            await gw.add_function("secret-model", FunctionTask.HANDLER)
            yield gw, http


async def test_strangers_see_no_names_on_the_port_of_the_clients() -> None:
    async with with_metrics_port() as (gw, apart):
        async with httpx2.AsyncClient(base_url=gw.url, trust_env=False) as http:
            assert (await http.get("/health")).json() == {"status": "ready", "state": "alive"}
            refused = await http.get("/metrics")
            assert refused.status_code == 401 and "secret-model" not in refused.text
            described = (await http.get("/openapi.json")).json()["paths"]
            assert "security" not in described["/metrics"]["get"]
        async with gw.http(gw.caller_key) as http:
            assert (await http.get("/metrics")).status_code == 403
        async with gw.http() as http:
            assert "secret-model" in (await http.get("/metrics")).text
        assert "secret-model" in (await apart.get("/metrics")).text
        assert (await apart.get("/health")).json()["functions"] == 1
        assert (await apart.get("/livez")).json() == {"status": "alive"}
        assert (await apart.get("/readyz")).status_code == 200


async def test_strangers_do_not_see_why_it_is_not_ready() -> None:
    async with with_metrics_port(expect_nodes=2) as (gw, apart):
        async with httpx2.AsyncClient(base_url=gw.url, trust_env=False) as http:
            refused = await http.get("/readyz")
        assert refused.status_code == 503 and refused.json() == {"status": "not ready"}
        assert (await apart.get("/readyz")).json()["reasons"] == ["0 of 2 nodes have joined"]


async def test_the_metrics_port_serves_nothing_else() -> None:
    async with with_metrics_port() as (gw, apart):
        key = {"authorization": f"Bearer {gw.admin_key}"}
        for path in ("/admin/functions", "/v1/models", "/openapi.json", "/"):
            answered = await apart.get(path, headers=key)
            assert answered.status_code == 404 and answered.json()["error"]["code"] == "not_found"
        assert (await apart.post("/metrics", content=b"x" * 200_000)).status_code == 405


async def test_the_metrics_port_answers_while_the_other_is_full() -> None:
    async with with_metrics_port(max_in_flight=1, max_connections=4) as (gw, apart):
        gw.services.limiter.acquire()
        idle = [await asyncio.open_connection("127.0.0.1", gw.server.port) for _ in range(8)]
        assert (await apart.get("/health")).json()["in_flight"] == 1
        assert (await apart.get("/metrics")).status_code == 200
        gw.services.limiter.release()
        for _, writer in idle:
            writer.close()


async def test_connections_to_the_metrics_port_are_bounded() -> None:
    async with with_metrics_port(head_s=0.3) as (_, apart):
        port = apart.base_url.port
        assert port is not None
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        assert b"503" in await idle[-1][0].read()
        for reader, writer in idle:  # the others end with their deadline
            await reader.read()
            writer.close()
        assert (await apart.get("/metrics")).status_code == 200


async def test_a_metrics_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRecord, match=f"--metrics-port {port} of 127.0.0.1: .*in use"):
            async with metrics_listener(PlainTextResponse(""), "127.0.0.1", port):
                raise AssertionError


async def test_the_listener_leaves_no_connection() -> None:
    async with gateway(metrics_port=0) as gw:
        app = make_metrics_app(gw.services, gw.collector)
        async with metrics_listener(app, "127.0.0.1", 0) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()
