"""The whole node, from its parts."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from invoker.assembly.accounting import open_accounting
from invoker.assembly.casting import Casting, open_casting
from invoker.assembly.images import open_images, start_checks
from invoker.assembly.instances import instance_context, open_vllm
from invoker.assembly.logs import open_logs
from invoker.assembly.memory import open_memory
from invoker.assembly.setup import NodeSetup
from invoker.instances.calls import Calls
from invoker.instances.instance import Instance, ModelRunner
from invoker.instances.manager import Instances
from invoker.kv.transfer import KvConnector
from invoker.live.groups import open_group
from invoker.live.hosted import HostedStages
from invoker.live.pipelines import HostedPipelines
from invoker.loading.attach import AttachServer, socket_path
from invoker.loading.engine_images import EngineImages
from invoker.node import Node, NodeDependencies, remote_error
from invoker.pipeline.engines import StageContext
from invoker.publisher import Publisher
from rdmacast.address import TcpAddress, parse_url
from registry.channel.client import Channel, ChannelServer
from registry.records.engine import EngineKind
from registry.records.instance import InstanceRecord


async def assemble(setup: NodeSetup, stack: AsyncExitStack) -> tuple[Node, Publisher, ChannelServer]:
    """Build a node, its publisher and its channel server, all closed by `stack`.

    Raises SettingsError, HostTierError or OSError.
    """
    settings = setup.settings
    memory = await open_memory(setup, stack)
    casting = open_casting(setup, memory.arena, stack)
    accounting = await open_accounting(setup, memory.facts.gpu_count, stack)
    images = await open_images(setup, memory, casting, accounting, stack)
    rings = await open_logs(setup, stack)
    vllm = await open_vllm(setup, memory, stack)
    listener = casting.listener
    connect = partial(Channel.connect, secret=settings.secret, tls=setup.channel_tls.client)

    async def lead(instance: Instance) -> ModelRunner:  # the context is bound late
        return await open_group(instance, settings.node_id, connect, listener, context)

    resources = instance_context(setup, memory.arena, images, accounting.meter, rings, vllm, lead, stack)
    tracing = setup.tracing
    changed: Callable[[InstanceRecord], None] = accounting.publisher.instance_changed
    if tracing is not None:
        changed = tracing.starts.watched(changed)
    instances = Instances(settings.node_id, resources, accounting.counters, published=changed)
    context = StageContext(
        resources=resources, calls=accounting.calls, instance=instances.get, tracing=tracing
    )
    pipelines = HostedPipelines(
        settings.node_id, connect, listener, context, lambda peer: peer in channel.peers
    )
    kv_connector = KvConnector(listener, settings.kv_moves)
    stack.push_async_callback(kv_connector.aclose)
    dependencies = NodeDependencies(
        settings=settings,
        facts=memory.facts,
        clock=setup.clock,
        arena=memory.arena,
        tier=memory.tier,
        folders=memory.folders,
        device_cache=images.device_cache,
        published=images.published,
        loader=images.loader,
        instances=instances,
        loads=resources.loads,
        stages=HostedStages(listener, context),
        pipelines=pipelines,
        kv_connector=kv_connector,
        meter=accounting.meter,
        calls=accounting.calls,
        rings=rings,
        counters=accounting.counters,
        cast_sent_bytes=lambda: casting.regions.counters["cast_sent_bytes"],
        quarantined_bytes=casting.transports.quarantined_bytes,
        changed=accounting.publisher.node_changed,
        links=casting.links,
        disk=images.disk,
        disk_writer=images.disk_writer,
        port_rate=casting.links.connector.port_rate,
        tracing=tracing,
        engines=(EngineKind.NATIVE, *((EngineKind.VLLM,) if vllm is not None else ())),
    )
    node = Node(dependencies, setup.epoch)
    start_checks(images, memory.tier, instances, changed=accounting.publisher.node_changed, stack=stack)
    stack.push_async_callback(instances.drain, 0.0)
    stack.push_async_callback(pipelines.aclose)
    channel = await _open_servers(setup, node, accounting.calls, casting, resources.engine_images, stack)
    return node, accounting.publisher, channel


async def _open_servers(
    setup: NodeSetup,
    node: Node,
    calls: Calls,
    casting: Casting,
    engine_images: EngineImages,
    stack: AsyncExitStack,
) -> ChannelServer:
    settings = setup.settings
    await stack.enter_async_context(casting.regions)
    await stack.enter_async_context(casting.listener)
    channel = ChannelServer(
        TcpAddress(settings.listen_host, settings.listen_port).url,
        settings.secret,
        node.handle,
        tls=setup.channel_tls.server,
        translate=remote_error,
        on_peer_closed=lambda peer, _: calls.peer_closed(peer),
    )
    await stack.enter_async_context(channel)
    attach = AttachServer(socket_path(setup.root, settings.node_id), engine_images.open)
    await stack.enter_async_context(attach.listening())
    port = parse_url(channel.url).port
    node.listening(TcpAddress(settings.advertise, port).url, casting.regions.address.url)
    return channel
