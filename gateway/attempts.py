"""What the attempts of a call used: told with its outputs, or asked of the node where it was cut short."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.contract import CallUse
from gateway.node_client import NodeClient
from registry.errors import ChannelError
from registry.messages import CallsUsed, EndCalls
from registry.usage import GpuSlice

log = logging.getLogger(__name__)

_ASK_S = 3.0


@dataclass(slots=True)
class Attempt:
    """One instance's work on a call. `client` is the channel that it went over: if that breaks, the node
    writes to the ledger what it spent. None: the work came by other nodes, as to a stage of a pipeline."""

    call_id: str
    instance_id: str
    node: str
    client: NodeClient | None
    gpu_us: int = 0
    exact: bool = False

    @property
    def use(self) -> CallUse:
        gpu = GpuSlice(call_id=self.call_id, instance_id=self.instance_id, node=self.node, gpu_us=self.gpu_us)
        return CallUse(gpu=gpu, exact=self.exact)


async def ask_used(attempts: Sequence[Attempt], clients: Mapping[str, NodeClient]) -> None:
    """End these attempts and set what each used; one whose node does not say in time stays as it was."""
    by_node: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        by_node.setdefault(attempt.node, []).append(attempt)
    await asyncio.gather(*(_ask_node(clients[node], asked) for node, asked in by_node.items()))


async def _ask_node(client: NodeClient, attempts: Sequence[Attempt]) -> None:
    node = attempts[0].node
    request = EndCalls(request_ids=tuple(attempt.call_id for attempt in attempts))
    try:
        async with asyncio.timeout(_ASK_S), client.call(request) as replies:
            async for reply in replies:
                if isinstance(reply, CallsUsed):
                    for attempt in attempts:
                        if attempt.call_id in reply.gpu_us:
                            attempt.gpu_us, attempt.exact = reply.gpu_us[attempt.call_id], True
    except (ChannelError, TimeoutError) as error:
        log.info("node %s did not say what %d calls used: %r", node, len(attempts), error)
