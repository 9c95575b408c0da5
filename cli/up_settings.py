"""What `up` was asked to start, checked once."""

import os
from dataclasses import dataclass
from pathlib import Path

from cli.errors import UsageError
from cli.leftovers import SHM
from invoker.emulated.profiles import known_device
from rdmacast.tls import TlsFiles, load_tls
from registry.embedded_redis import Durability
from registry.emulation import is_emulated, parse_device
from registry.errors import InvalidRecord

MAX_NODES = 256
MAX_GATEWAYS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """`hosts=None`: all nodes share this machine's host tier. Sizes are bytes, rates bytes a second."""

    nodes: int
    hosts: int | None
    host: str
    port: int
    data_dir: Path
    device: str
    redis_url: str | None
    link_rate: str | None
    gpu_memory: str | None
    host_memory: str | None
    shm_dir: Path
    allow_handlers: bool
    meter_interval: str | None
    kv_moves: str | None
    gateways: int
    appendfsync: Durability
    cores: int
    cast_tls: TlsFiles | None

    @property
    def ports(self) -> tuple[int, ...]:
        """The port of each gateway, 0 where any free one will do."""
        return tuple(self.port and self.port + index for index in range(self.gateways))

    @property
    def host_ids(self) -> tuple[str | None, ...]:
        """The virtual host of each node, None where it is this machine itself."""
        if self.hosts is None:
            return (None,) * self.nodes
        return tuple(f"host-{index % self.hosts}" for index in range(self.nodes))

    @property
    def devices(self) -> tuple[str, ...]:
        """The device flag of each node: one GPU each where GPUs are used."""
        if self.device == "cuda":
            return tuple(f"cuda:{index}" for index in range(self.nodes))
        return (self.device,) * self.nodes

    @property
    def threads(self) -> int:
        return max(1, self.cores // self.nodes)


def count_gpus(proc: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """NVIDIA GPUs that the driver shows, without importing anything heavy."""
    return len(list(proc.iterdir())) if proc.is_dir() else 0


def default_data_dir() -> Path:
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "hypercast"


def settle(
    *,
    nodes: int | None,
    hosts: int | None,
    host: str,
    port: int,
    data_dir: Path,
    device: str,
    redis_url: str | None,
    link_rate: str | None,
    gpu_memory: str | None,
    host_memory: str | None,
    shm_dir: Path = SHM,
    allow_handlers: bool,
    meter_interval: str | None,
    kv_moves: str | None = None,
    gateways: int,
    appendfsync: Durability,
    gpus: int,
    cores: int,
    cast_tls: TlsFiles | None = None,
) -> UpSettings:
    """Fill in defaults and refuse what cannot work. Raises UsageError."""
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if is_emulated(device):
        link_rate = link_rate or emulated_link_rate(device)
    elif device not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {device!r}: use auto, cpu, cuda or emulated:GPU")
    if device == "cuda" and not gpus:
        raise UsageError(
            "no NVIDIA GPU is visible on this machine; use --device cpu, or see `hypercast doctor`"
        )
    if not os.access(shm_dir, os.W_OK | os.X_OK):
        raise UsageError(f"--shm-dir {shm_dir} is no folder that you may write to")
    if nodes is None:
        nodes = gpus if device == "cuda" else 2
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"--nodes must be 1 to {MAX_NODES}, not {nodes}")
    if not 1 <= gateways <= MAX_GATEWAYS:
        raise UsageError(f"--gateways must be 1 to {MAX_GATEWAYS}, not {gateways}")
    if port and port + gateways - 1 > 65535:
        raise UsageError(f"--gateways {gateways} need as many ports from --port {port} on")
    if redis_url is not None and appendfsync != "everysec":
        raise UsageError("--appendfsync is for the embedded Redis; set it in the one of --redis-url")
    if device == "cuda" and nodes > gpus:
        raise UsageError(f"--nodes {nodes} is more than the {gpus} GPUs of this machine")
    if link_rate is not None and hosts is None:
        hosts = nodes  # transfers between nodes of one host do not cross a link
    if hosts is not None and not 1 <= hosts <= nodes:
        raise UsageError(f"--hosts must be 1 to the number of nodes ({nodes}), not {hosts}")
    if link_rate is not None and hosts != nodes:
        raise UsageError("--link-rate implies one virtual host a node; leave --hosts out")
    return UpSettings(
        nodes=nodes,
        hosts=hosts,
        host=host,
        port=port,
        data_dir=data_dir.expanduser().resolve(),
        device=device,
        redis_url=redis_url,
        link_rate=link_rate,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        shm_dir=shm_dir.resolve(),
        allow_handlers=allow_handlers,
        meter_interval=meter_interval,
        kv_moves=kv_moves,
        gateways=gateways,
        appendfsync=appendfsync,
        cores=cores,
        cast_tls=cast_tls,
    )


def emulated_link_rate(device: str) -> str:
    """What a node of such a device has by its datasheet, at its scale. Raises UsageError."""
    try:
        wanted = parse_device(device)
        _, links = known_device(wanted)
    except InvalidRecord as error:
        raise UsageError(f"--device: {error}") from error
    return f"{max(1, int(links.network / wanted.scale / wanted.slower))}B/s"


def tls_files(cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """Raises UsageError where some are given and others not, or they are not what they should be."""
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise UsageError("--cast-tls-cert, --cast-tls-key and --cast-tls-ca belong together")
    files = TlsFiles(cert=cert.resolve(), key=key.resolve(), ca=ca.resolve())
    try:
        load_tls(files)
    except OSError as error:
        named = f"{files.cert}, {files.key} and {files.ca}"
        raise UsageError(f"nodes cannot use {named} for TLS: {error}") from error
    return files
