"""The tokenizers that nodes need for sequences with a grammar: each is sent once over a channel."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from gateway.cluster.node_client import ChannelPool, NodeClient
from gateway.cluster.start_assets import StartAssets
from registry.errors import ChannelClosed, RemoteError
from registry.messages.node import AddTokenizer
from registry.records.function import FunctionVersion

TOKENIZER_FILE = "tokenizer.json"


class TokenizerSender:
    """Sends tokenizers to nodes; the digests sent over each channel are kept with it."""

    def __init__(self, channels: ChannelPool, assets: StartAssets) -> None:
        self._channels = channels
        self._assets = assets
        self._sent: WeakKeyDictionary[NodeClient, set[str]] = WeakKeyDictionary()

    async def send(self, version: FunctionVersion, nodes: Sequence[str]) -> None:
        """Send the version's tokenizer to the nodes that have not got it, all stages of a pipeline.

        Raises ChannelClosed, RemoteError (`pipeline_lost` if one of several nodes is lost), ImageError.
        """
        digest = version.assets[TOKENIZER_FILE]
        for node in nodes:
            try:
                await self._send(version, digest, node)
            except ChannelClosed as error:
                if len(nodes) == 1:
                    raise
                raise RemoteError("pipeline_lost", f"node {node} of the pipeline is lost") from error

    async def _send(self, version: FunctionVersion, digest: str, node: str) -> None:
        client = self._channels.client(node)
        if client is None:
            raise ChannelClosed(f"no channel to {node}")
        if digest in self._sent.setdefault(client, set()):
            return
        content = await self._assets.file(version, TOKENIZER_FILE)
        async with client.call(AddTokenizer(digest=digest, content=content)) as replies:
            async for _ in replies:
                pass
        self._sent[client].add(digest)

    def forget(self, node: str) -> None:
        """Send all again to a node that has dropped one."""
        client = self._channels.client(node)
        if client is not None:
            self._sent.pop(client, None)
