"""The tokenizers that nodes need for sequences with a grammar: each is sent once over a channel."""

import asyncio
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from gateway.cluster.node_client import ChannelPool, NodeClient
from gateway.cluster.start_assets import StartAssets
from registry.errors import ChannelClosed, RemoteError
from registry.messages.images import AddTokenizer
from registry.records.function import FunctionVersion

TOKENIZER_FILE = "tokenizer.json"


class _Sent:
    """The digests sent over one channel; the lock lets concurrent calls share one transfer."""

    def __init__(self) -> None:
        self.digests: set[str] = set()
        self.lock = asyncio.Lock()


class TokenizerSender:
    """Sends tokenizers to nodes; the digests sent over each channel are kept with it."""

    def __init__(self, channels: ChannelPool, assets: StartAssets) -> None:
        self._channels = channels
        self._assets = assets
        self._sent: WeakKeyDictionary[NodeClient, _Sent] = WeakKeyDictionary()

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
        sent = self._sent.setdefault(client, _Sent())
        async with sent.lock:
            if digest in sent.digests:
                return
            content = await self._assets.file(version, TOKENIZER_FILE)
            async with client.call(AddTokenizer(digest=digest, content=content)) as replies:
                async for _ in replies:
                    pass
            sent.digests.add(digest)

    def forget(self, nodes: Sequence[str]) -> None:
        """Send all again to nodes one of which has dropped a tokenizer."""
        for node in nodes:
            client = self._channels.client(node)
            if client is not None and client in self._sent:
                self._sent[client].digests.clear()
