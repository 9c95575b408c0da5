"""/admin: operations on the running cluster (scale, warm, drop, logs, nodes, instances, casts)."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.bodies import managed_function, read_json
from gateway.api.cast_view import show
from gateway.core.contract import PulledModel, WaitStage
from gateway.core.errors import translate
from gateway.core.request_context import RequestContext, request_context
from gateway.http.disconnect import CancelOnDisconnect
from gateway.http.limits import ClientGone
from gateway.http.responses import raw_json
from gateway.http.sse import ByteStream
from gateway.requests.services import Services
from gateway.schemas.admin import DrainRequest, DropRequest, PullRequest, ScaleRequest, WarmRequest
from gateway.schemas.answers import (
    CordonedNode,
    DrainedNode,
    DroppedImage,
    InstanceList,
    NodeList,
    NodeView,
    ScaledFunction,
    view,
)
from gateway.schemas.parameters import FOLLOW, LINES, OF_CAST, OF_FUNCTION, SUMMARY
from registry.records.change import NodeUp, Snapshot

_log = logging.getLogger("hypercast.gateway")


class ClusterAdmin:
    """The handlers of cluster operations."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._scale = msgspec.json.Decoder(ScaleRequest)
        self._warm = msgspec.json.Decoder(WarmRequest)
        self._pull = msgspec.json.Decoder(PullRequest)
        self._drain = msgspec.json.Decoder(DrainRequest)
        self._drop = msgspec.json.Decoder(DropRequest)

    async def scale(self, request: Request) -> ScaledFunction:
        """Set the number of instances once."""
        name = await self._known(request)
        payload = await read_json(request, self._services, self._scale, absent=b"{}")
        await self._services.cluster.scale(name, payload.instances, payload.on, wait=payload.wait)
        return ScaledFunction(name=name, instances=payload.instances, waited=payload.wait)

    async def warm(self, request: Request) -> ASGIApp:
        """Fill host tiers; progress is one JSON object a line, the last `{"done": true}`."""
        name = await self._known(request)
        payload = await read_json(request, self._services, self._warm, absent=b"{}")
        return self._progress(request, self._services.cluster.warm(name, payload.nodes, payload.on))

    async def pull(self, request: Request) -> ASGIApp:
        """Make a folder for other engines; progress is one JSON object a line, the last has the folder."""
        name = await self._known(request)
        payload = await read_json(request, self._services, self._pull, absent=b"{}")
        return self._progress(request, self._services.cluster.pull(name, payload.on))

    def _progress(self, request: Request, steps: AsyncIterator[WaitStage | PulledModel]) -> ASGIApp:
        async def lines() -> AsyncGenerator[bytes, None]:
            async for step in steps:
                yield msgspec.json.encode(step) + b"\n"
            yield b'{"done":true}\n'

        return LineReply(self._services, request_context(request.scope), "application/x-ndjson", lines())

    async def drop(self, request: Request) -> DroppedImage:
        """Drop an idle image from a tier."""
        name = await self._known(request)
        payload = await read_json(request, self._services, self._drop, absent=b"{}")
        await self._services.cluster.drop(name, payload.tier, payload.on)
        return DroppedImage(name=name, tier=payload.tier)

    async def logs(self, request: Request) -> ASGIApp:
        """Send log lines as text, with new ones if `follow=true`."""
        function = await managed_function(request, self._services)
        since = min(function.versions)  # what came before is of a deleted function of this name
        found = self._services.cluster.logs(function.name, since, LINES.read(request), FOLLOW.read(request))

        async def lines() -> AsyncGenerator[bytes, None]:
            async for line in found:
                yield line.encode(errors="replace") + b"\n"

        return LineReply(self._services, request_context(request.scope), "text/plain; charset=utf-8", lines())

    async def nodes(self, request: Request) -> msgspec.Struct:
        """List the nodes."""
        snapshot = self._services.cluster.view()
        nodes = sorted(snapshot.nodes, key=lambda up: up.record.id)
        answer: msgspec.Struct = NodeList(nodes=[_node(up, snapshot) for up in nodes])
        return answer

    async def cordon(self, request: Request) -> CordonedNode:
        """Have no further instances started on a node."""
        return await self._cordon(request, cordoned=True)

    async def uncordon(self, request: Request) -> CordonedNode:
        """Allow starts on a node again."""
        return await self._cordon(request, cordoned=False)

    async def _cordon(self, request: Request, *, cordoned: bool) -> CordonedNode:
        node = request.path_params["node"]
        await self._services.cluster.cordon(node, cordoned=cordoned)
        return CordonedNode(node=node, cordoned=cordoned)

    async def drain(self, request: Request) -> DrainedNode:
        """Move what runs on a node to others."""
        node = request.path_params["node"]
        payload = await read_json(request, self._services, self._drain, absent=b"{}")
        left = await self._services.cluster.drain(node, wait=payload.wait)
        return DrainedNode(node=node, instances=left)

    async def instances(self, request: Request) -> InstanceList:
        """List the instances; a group is one, with its members."""
        instances = self._services.cluster.view().instances
        return InstanceList(instances=[one for one in instances if one.takes_calls])

    async def casts(self, request: Request) -> Response:
        """List the casts that run, and those of the last hour."""
        function, summary = OF_FUNCTION.read(request), SUMMARY.read(request)
        prefix = OF_CAST.read(request) or ""
        found = await self._services.state.casts(prefix, function=function, brief=summary)
        nodes = {up.record.id: up.record for up in self._services.cluster.view().nodes}
        now = self._services.clock.wall_s()
        shown: list[bytes] = []
        for status in found:
            cast = show(status, nodes, now)
            shown.append(msgspec.json.encode(replace(cast, nodes=[]) if summary else cast))
            await asyncio.sleep(0)  # each may have thousands of nodes
        return raw_json(b'{"casts":[%b]}' % b",".join(shown))

    async def _known(self, request: Request) -> str:
        """Return the function's name, if the key may manage it. Raises NotFound, Forbidden."""
        return (await managed_function(request, self._services)).name


def _node(up: NodeUp, snapshot: Snapshot) -> msgspec.Struct:
    record = up.record
    names: dict[str, list[str]] = {}  # several functions and versions may share an image
    for version in sorted(snapshot.versions, key=lambda v: (v.function, v.version)):
        if version.image is not None:
            names.setdefault(version.image, []).append(f"{version.function}:{version.version}")
    tiers: dict[str, list[str]] = {"gpu": [], "host": [], "disk": []}
    for holding in record.holdings:
        for tier in holding.tiers:
            tiers.setdefault(str(tier), []).extend(names.get(holding.image, [holding.image]))
    instances = [instance for instance in snapshot.instances if instance.node == record.id]
    return view(NodeView, record, tiers=tiers, instances=instances)


@dataclass(frozen=True, slots=True, eq=False)
class LineReply:
    """A stream of lines. The head waits for the first line, so that an error before it has its own status.

    A later error is a last line with the error envelope; with `cuts` the response is cut off instead, where
    such a line would be taken for a row.
    """

    services: Services
    context: RequestContext
    media_type: str
    lines: AsyncGenerator[bytes, None]
    cuts: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = ByteStream(send, self.services.settings.streams.write_timeout_s, self.media_type)
        try:
            with CancelOnDisconnect(scope) as guard:
                async with aclosing(self.lines) as lines:
                    async for line in lines:
                        if not stream.started:
                            await stream.start(())
                        await stream.write(line)
                guard.disarm()
                if not stream.started:
                    await stream.start(())
                await stream.end()
        except ClientGone:
            raise
        except Exception as error:  # an envelope, once the stream has started
            known = translate(error)
            if not stream.started or known is None:
                raise
            if self.cuts:
                _log.warning("request %s: its response was cut off: %s", self.context.request_id, error)
                raise
            self.context.error_code = known.code
            await stream.end(known.envelope() + b"\n")
