"""Requests to nodes by which calls of a disaggregated function move from prompts to decode instances."""

import logging

from gateway.cluster.node_client import NodeClient
from registry.errors import ChannelError
from registry.messages.live import HandOffCalls, PrefetchKv

log = logging.getLogger(__name__)


async def prefetch_kv(client: NodeClient, request: PrefetchKv) -> bool:
    """Send a request to a decode instance's node; return whether it fetches the K and V.

    If not, they are fetched after the prompt, by any node.
    """
    return await _sent(client, request, f"instance {request.instance_id} does not prefetch K and V")


async def hand_off(client: NodeClient, request: HandOffCalls) -> None:
    """Send a request to the head of a pipeline; if it fails, the calls stay there until the pipeline ends."""
    await _sent(client, request, f"calls of pipeline {request.pipeline} stay")


async def _sent(client: NodeClient, request: PrefetchKv | HandOffCalls, otherwise: str) -> bool:
    try:
        async with client.call(request) as replies:
            async for _ in replies:
                pass
    except ChannelError as error:
        log.info("%s: %r", otherwise, error)
        return False
    return True
