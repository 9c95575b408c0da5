"""Requests to nodes by which running calls move to other instances."""

import logging

from gateway.cluster.node_client import NodeClient
from registry.errors import ChannelError
from registry.messages.live import HandOffCalls, LeaveInstance, PrefetchKv

log = logging.getLogger(__name__)


async def prefetch_kv(client: NodeClient, request: PrefetchKv) -> bool:
    """Send a request to a decode instance's node; return whether it fetches the K and V.

    If not, they are fetched after the prompt, by any node.
    """
    return await _sent(client, request, f"instance {request.instance_id} does not prefetch K and V")


async def hand_off(client: NodeClient, request: HandOffCalls) -> bool:
    """Send a request to the head of a pipeline; if it fails, the calls stay there until the pipeline ends."""
    return await _sent(client, request, f"calls of pipeline {request.pipeline} stay")


async def leave_instance(client: NodeClient, request: LeaveInstance) -> bool:
    """Send a request to an instance's node; if it fails, the calls stay there until they end."""
    return await _sent(client, request, f"calls of instance {request.instance_id} stay")


async def _sent(
    client: NodeClient, request: PrefetchKv | HandOffCalls | LeaveInstance, otherwise: str
) -> bool:
    try:
        async with client.call(request) as replies:
            async for _ in replies:
                pass
    except ChannelError as error:
        log.info("%s: %r", otherwise, error)
        return False
    return True
