"""/admin: operating the running cluster (scale, warm, drop, logs, nodes, instances, casts)."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import exchange as exchanges
from gateway.cast_view import show
from gateway.disconnect import Attended
from gateway.errors import translate
from gateway.exchange import Exchange
from gateway.limits import ClientGone, decode, read_body
from gateway.parameters import FOLLOW, LINES, OF_CAST, OF_FUNCTION, SUMMARY
from gateway.responses import encoded, json_response
from gateway.schemas_admin import Drop, Scale, Warm
from gateway.services import Services
from gateway.sse import ByteStream
from registry.change import NodeUp, Snapshot

T = TypeVar("T")


class ClusterAdmin:
    """What operators ask of the cluster."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._scale = msgspec.json.Decoder(Scale)
        self._warm = msgspec.json.Decoder(Warm)
        self._drop = msgspec.json.Decoder(Drop)

    async def scale(self, request: Request) -> Response:
        """Set the number of instances once."""
        name = await self._known(request)
        asked = await self._body(request, self._scale)
        await self._services.cluster.scale(name, asked.instances, asked.on, wait=asked.wait)
        return encoded({"name": name, "instances": asked.instances, "waited": asked.wait})

    async def warm(self, request: Request) -> ASGIApp:
        """Fill host tiers; progress comes as one JSON object a line, last `{"done": true}`."""
        name = await self._known(request)
        asked = await self._body(request, self._warm)
        stages = self._services.cluster.warm(name, asked.nodes, asked.on)

        async def lines() -> AsyncGenerator[bytes, None]:
            async for stage in stages:
                yield msgspec.json.encode({"stage": stage.stage, "fraction": stage.fraction}) + b"\n"
            yield b'{"done":true}\n'

        return LineReply(self._services, exchanges.of(request.scope), "application/x-ndjson", lines())

    async def drop(self, request: Request) -> Response:
        """Drop an idle image from a tier."""
        name = await self._known(request)
        asked = await self._body(request, self._drop)
        await self._services.cluster.drop(name, asked.tier, asked.on)
        return encoded({"name": name, "tier": asked.tier})

    async def logs(self, request: Request) -> ASGIApp:
        """Log lines as text, new ones too with `follow=true`."""
        name = await self._known(request)
        found = self._services.cluster.logs(name, LINES.read(request), FOLLOW.read(request))

        async def lines() -> AsyncGenerator[bytes, None]:
            async for line in found:
                yield line.encode(errors="replace") + b"\n"

        return LineReply(self._services, exchanges.of(request.scope), "text/plain; charset=utf-8", lines())

    async def nodes(self, request: Request) -> Response:
        view = self._services.cluster.view()
        return encoded({"nodes": [_node(up, view) for up in sorted(view.nodes, key=lambda up: up.record.id)]})

    async def instances(self, request: Request) -> Response:
        view = self._services.cluster.view()
        return encoded({"instances": view.instances})

    async def casts(self, request: Request) -> Response:
        """What moves between nodes, and what did in the last hour."""
        function, summary = OF_FUNCTION.read(request), SUMMARY.read(request)
        beginning = OF_CAST.read(request) or ""
        found = await self._services.state.casts(beginning, function=function, brief=summary)
        nodes = {up.record.id: up.record for up in self._services.cluster.view().nodes}
        now = self._services.clock.wall_s()
        shown: list[bytes] = []
        for status in found:
            cast = show(status, nodes, now)
            shown.append(msgspec.json.encode(replace(cast, nodes=[]) if summary else cast))
            await asyncio.sleep(0)  # each may be of thousands of nodes
        return json_response(b'{"casts":[%b]}' % b",".join(shown))

    async def _known(self, request: Request) -> str:
        """The function's name. Raises NotFound."""
        return (await self._services.state.function(request.path_params["name"])).name

    async def _body(self, request: Request, decoder: msgspec.json.Decoder[T]) -> T:
        limits = self._services.settings.limits
        body = await read_body(request.scope, request.receive, limits)
        return decode(body or b"{}", decoder, limits)


def _node(up: NodeUp, view: Snapshot) -> dict[str, object]:
    record = up.record
    names: dict[str, list[str]] = {}  # one image may be that of several functions and versions
    for version in sorted(view.versions, key=lambda v: (v.function, v.version)):
        if version.image is not None:
            names.setdefault(version.image, []).append(f"{version.function}:{version.version}")
    tiers: dict[str, list[str]] = {"gpu": [], "host": [], "disk": []}
    for holding in record.holdings:
        for tier in holding.tiers:
            tiers.setdefault(str(tier), []).extend(names.get(holding.image, [holding.image]))
    fields: dict[str, object] = msgspec.to_builtins(record)
    return {
        **fields,
        "tiers": tiers,
        "instances": [instance for instance in view.instances if instance.node == record.id],
    }


class LineReply:
    """A stream of lines. The head waits for the first line, so that a failure before it has its own
    status; a later one is a last line with the error envelope."""

    def __init__(
        self, services: Services, exchange: Exchange, media_type: str, lines: AsyncGenerator[bytes, None]
    ) -> None:
        self._services = services
        self._exchange = exchange
        self._media_type = media_type
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = ByteStream(send, self._media_type, self._services.settings.streams.write_timeout_s)
        try:
            async with Attended(receive) as attended:
                async with aclosing(self._lines) as lines:
                    async for line in lines:
                        if not stream.started:
                            await stream.start(())
                        await stream.write(line)
                attended.finish()
                if not stream.started:
                    await stream.start(())
                await stream.end()
        except ClientGone:
            raise
        except Exception as error:
            known = translate(error)
            if not stream.started or known is None:
                raise
            self._exchange.error_code = known.code
            await stream.end(known.envelope() + b"\n")
