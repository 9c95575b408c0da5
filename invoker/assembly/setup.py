"""What a node is built from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from invoker.device import DeviceFacts
from invoker.engine.factory import EngineFactory
from invoker.loading.disk_cache import SpaceOf
from invoker.loading.fetch_order import LoadSources
from invoker.memory.arena import Arena
from invoker.settings import Settings
from invoker.traces.node import NodeTracing
from rdmacast.protocol.tls import NodeTls
from registry.clock import Clock
from registry.state import ClusterConfig, State

MakeArena = Callable[[DeviceFacts, int], Arena]  # of so many bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    """What a node is built from; `make_arena` is None for that of its device."""

    settings: Settings
    state: State
    engines: EngineFactory
    config: ClusterConfig
    epoch: int
    clock: Clock
    channel_tls: NodeTls
    limit_sources: Callable[[LoadSources], LoadSources]
    make_arena: MakeArena | None
    space_of: SpaceOf
    tracing: NodeTracing | None = None

    @property
    def root(self) -> Path:
        """Return the cluster's folder in shared memory."""
        return self.settings.shm_dir / f"hypercast-{self.config.cluster_id}"

    @property
    def journals(self) -> Path:
        """Return the folder of what survives the SIGKILL of a node: metering journals and log lines."""
        if self.settings.journal_dir is not None:
            return self.settings.journal_dir / self.root.name
        return self.root / ".journals"  # not a valid host id
