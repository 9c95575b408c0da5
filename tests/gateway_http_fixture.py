"""A gateway's HTTP side on loopback, over the fakes beside its seams."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx2
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from gateway.app import make_app
from gateway.blob_keeper import BlobKeeper
from gateway.contract import CallUse, Deadlines
from gateway.control import Control
from gateway.fakes import FakeCluster, FakeDispatcher, MemoryBlobs
from gateway.server import GatewayServer
from gateway.services import Services, make_services
from gateway.settings import GatewaySettings, RequestLimits, StreamSettings
from registry.api_key import Role
from registry.clock import SystemClock
from registry.function import FunctionVersion, Scaling, Task
from registry.memory_state import MemoryState
from registry.prices import ensure_default_rates
from registry.secrets import new_api_key
from registry.state import Ledger

EOS = "<|end|>"


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges but for one, and an end token: every text has ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    vocabulary["he"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, "<s>"])
    return tokenizer


def tokenizer_with_bos() -> Tokenizer:
    tokenizer = byte_tokenizer()
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", bos)]
    )
    return tokenizer


@dataclass
class Gateway:
    """One gateway under test."""

    services: Services
    server: GatewayServer
    state: MemoryState
    dispatcher: FakeDispatcher
    cluster: FakeCluster
    blobs: MemoryBlobs
    keeper: BlobKeeper
    admin_key: str
    caller_key: str
    settled: list[CallUse]
    url: str = ""
    clients: list[AsyncOpenAI] = field(default_factory=list)

    def openai(self, key: str | None = None) -> AsyncOpenAI:
        client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key or self.caller_key, max_retries=0)
        self.clients.append(client)
        return client

    def http(self, key: str | None = None) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key or self.admin_key}"},
            trust_env=False,
            timeout=120,
        )

    async def add_function(
        self,
        name: str = "coder",
        task: Task = Task.GENERATE,
        *,
        context_length: int = 256,
        tokenizer: Tokenizer | None = None,
        files: dict[str, bytes] | None = None,
        **config: object,
    ) -> FunctionVersion:
        """A function straight into the state, with a tokenizer unless it is a handler."""
        assets = {"config.json": json.dumps(config).encode(), **(files or {})}
        if tokenizer is not None:
            assets["tokenizer.json"] = tokenizer.to_str().encode()
        version = await self.state.create_version(
            FunctionVersion(
                function=name,
                version=0,
                task=task,
                architecture="Fake",
                image=None,
                manifest=None,
                image_bytes=0,
                blocks=0,
                dtype="float32",
                context_length=context_length,
                assets={file: self.blobs.put(data) for file, data in assets.items()},
                created_at=1.0,
            ),
            Scaling(),
        )
        await self.cluster.refresh()
        self.services.functions.forget(name)
        return version


@asynccontextmanager
async def gateway(
    *,
    deadlines: Deadlines | None = None,
    limits: RequestLimits | None = None,
    streams: StreamSettings | None = None,
    grace_s: float = 5.0,
    expect_nodes: int = 0,
    state: MemoryState | None = None,
    control: Control | None = None,
    ledger: Ledger | None = None,
) -> AsyncIterator[Gateway]:
    """A real uvicorn server on a free port of loopback; its calls go to `control` if one is given, its bills
    to `ledger`."""
    clock, state, blobs = SystemClock(), state or MemoryState(), MemoryBlobs()
    settings = GatewaySettings(
        port=0,
        grace_s=grace_s,
        expect_nodes=expect_nodes,
        deadlines=deadlines or Deadlines(),
        limits=limits or RequestLimits(),
        streams=streams or StreamSettings(),
    )
    admin = new_api_key("ops", Role.ADMIN, "admin")
    caller = new_api_key("acme", Role.CALLER, "caller")
    await state.put_key(admin.key)
    await state.put_key(caller.key)
    await ensure_default_rates(state)
    dispatcher, cluster = FakeDispatcher(), FakeCluster(state)
    settled: list[CallUse] = []
    services = make_services(
        settings=settings,
        state=state,
        blobs=blobs,
        dispatcher=dispatcher if control is None else control.dispatcher,
        cluster=cluster,
        clock=clock,
        settled=settled.extend if control is None else control.settlement.note,
        ledger=ledger,
    )
    keeper = BlobKeeper(blobs, state, clock, holder="test", grace_s=3600)
    await services.pulse.beat(rates=True)
    server = GatewayServer(make_app(services, keeper), services.gate, settings)
    running = Gateway(
        services=services,
        server=server,
        state=state,
        dispatcher=dispatcher,
        cluster=cluster,
        blobs=blobs,
        keeper=keeper,
        admin_key=admin.plaintext,
        caller_key=caller.plaintext,
        settled=settled,
    )
    serving = asyncio.create_task(server.serve_and_drain())
    keeping = asyncio.create_task(services.places.run())
    try:
        await server.listening.wait()
        running.url = f"http://127.0.0.1:{server.port}"
        yield running
    finally:
        for client in running.clients:
            await client.close()
        server.leave()
        async with asyncio.timeout(grace_s + 110):
            await serving
        keeping.cancel()
        await asyncio.wait([keeping])
        await services.aclose()
