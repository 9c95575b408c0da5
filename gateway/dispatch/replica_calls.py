"""The GPU time that a call used on each replica: reported with its output, or requested after an abort."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec

from gateway.cluster.node_client import NodeClient
from gateway.core.contract import CallUsage
from registry.errors import ChannelError
from registry.messages.node import CallsUsed, EndCalls
from registry.records.usage import GpuSlice

log = logging.getLogger(__name__)

_USAGE_TIMEOUT_S = 3.0


class ReplicaCall(msgspec.Struct):
    """One replica's work on a call.

    `client` is the channel that carried it: if that breaks, the node writes its usage to the ledger itself.
    None: the work came through another node, as for a stage of a pipeline.
    """

    call_id: str
    instance_id: str
    node: str
    client: NodeClient | None
    gpu_us: int = 0
    exact: bool = False

    def use(self) -> CallUsage:
        gpu = GpuSlice(call_id=self.call_id, instance_id=self.instance_id, node=self.node, gpu_us=self.gpu_us)
        return CallUsage(gpu=gpu, exact=self.exact)


async def collect_usage(replica_calls: Sequence[ReplicaCall], clients: Mapping[str, NodeClient]) -> None:
    """End the replica calls and set the usage of each; of nodes that time out it stays inexact."""
    by_node: dict[str, list[ReplicaCall]] = {}
    for call in replica_calls:
        by_node.setdefault(call.node, []).append(call)
    await asyncio.gather(*(_collect_from(clients[node], calls) for node, calls in by_node.items()))


async def _collect_from(client: NodeClient, replica_calls: Sequence[ReplicaCall]) -> None:
    node = replica_calls[0].node
    request = EndCalls(request_ids=tuple(call.call_id for call in replica_calls))
    try:
        async with asyncio.timeout(_USAGE_TIMEOUT_S), client.call(request) as replies:
            async for reply in replies:
                if isinstance(reply, CallsUsed):
                    for call in replica_calls:
                        if call.call_id in reply.gpu_us:
                            call.gpu_us, call.exact = reply.gpu_us[call.call_id], True
    except (ChannelError, TimeoutError) as error:
        log.info("node %s did not report the usage of %d calls: %r", node, len(replica_calls), error)
