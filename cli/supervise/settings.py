"""The settings of `up`, checked once."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from cli.errors import UsageError
from invoker.emulated.profiles import find_device
from registry.config.emulation import is_emulated, parse_device
from registry.config.options import Options, default_data_dir
from registry.config.tls import check_tls, tls_settings
from registry.errors import InvalidRecord
from registry.tracing.settings import tracing_settings

MAX_NODES = 256
MAX_GATEWAYS = 16
_CUDA = re.compile(r"cuda(?:x([1-9]\d?))?")
_FILES = (
    *("redis_password_file", "redis_ca", "redis_cert", "redis_key", "tls_cert", "tls_key"),
    *(f"{links}_tls_{file}" for links in ("channel", "cast") for file in ("cert", "key", "ca")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """How a process joins the cluster."""

    redis_url: str
    secret_file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What `up` starts: its options, checked and with every default filled in.

    `hosts=None`: all nodes share this machine's host tier.
    """

    options: Options
    nodes: int
    hosts: int | None
    device: str
    data_dir: Path
    cores: int

    @property
    def ports(self) -> tuple[int, ...]:
        """The port of each gateway, 0 where any free one will do."""
        port = self.options.port
        return tuple(port and port + index for index in range(self.options.gateways))

    @property
    def metrics_ports(self) -> tuple[int | None, ...]:
        """The metrics port of each gateway, None without one."""
        port = self.options.metrics_port
        return tuple(port and port + index for index in range(self.options.gateways))

    @property
    def host_ids(self) -> tuple[str | None, ...]:
        """The virtual host of each node, None where it is this machine."""
        if self.hosts is None:
            return (None,) * self.nodes
        return tuple(f"host-{index % self.hosts}" for index in range(self.nodes))

    @property
    def leaves(self) -> tuple[str | None, ...]:
        """The leaf switch of each node, None without any: hosts with consecutive numbers share one."""
        count, hosts = self.options.leaves, self.hosts
        if count is None or hosts is None:
            return (None,) * self.nodes
        return tuple(f"leaf-{index % hosts * count // hosts}" for index in range(self.nodes))

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each node, with GPUs of its own."""
        if (count := gpus_per_node(self.device)) is not None:
            starts = range(0, self.nodes * count, count)
            return tuple("cuda:" + ",".join(map(str, range(at, at + count))) for at in starts)
        return (self.device,) * self.nodes

    def of_gateway(self, name: str, port: int, joined: Joined, metrics_port: int | None = None) -> Options:
        """Return the options of one gateway."""
        return replace(
            self.options,
            # A fixed name: after a restart it has the controller's lease again at once.
            gateway_id=name,
            port=port,
            metrics_port=metrics_port,
            redis_url=joined.redis_url,
            secret_file=joined.secret_file,
            store=str(self.data_dir / "store"),
            admin_key_file=self.data_dir / "admin.key",
            expect_nodes=self.nodes,
        )

    def of_nodes(self, joined: Joined) -> dict[str, Options]:
        """Return the options of each node, by its id."""
        return {
            f"node-{index}": replace(
                self.options,
                node_id=f"node-{index}",
                host_id=host,
                leaf=leaf,
                device=device,
                redis_url=joined.redis_url,
                secret_file=joined.secret_file,
                disk_cache_dir=self.options.disk_cache_dir or self.data_dir / "disk-cache",
                threads=max(1, self.cores // self.nodes),
                nodes_hint=self.nodes,
            )
            for index, (host, leaf, device) in enumerate(
                zip(self.host_ids, self.leaves, self.devices, strict=True)
            )
        }


def gpus_per_node(device: str) -> int | None:
    """Return how many GPUs each node has, by the device of `up`; None for another device."""
    found = _CUDA.fullmatch(device)
    return None if found is None else int(found[1] or 1)


def count_gpus(proc: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Return the number of NVIDIA GPUs that the driver lists."""
    return len(list(proc.iterdir())) if proc.is_dir() else 0


def settle(options: Options, *, gpus: int, cores: int) -> UpSettings:
    """Fill in defaults and refuse what cannot work. Raises UsageError."""
    device, link_rate = options.device, options.link_rate_bytes_s
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if is_emulated(device):
        link_rate = link_rate or emulated_link_rate(device)
    elif device != "cpu" and gpus_per_node(device) is None:
        raise UsageError(f"unknown device {device!r}: use auto, cpu, cuda, cudaxN or emulated:GPU")
    nodes = options.nodes
    if nodes is None:
        count = gpus_per_node(device)
        nodes = 2 if count is None else max(1, gpus // count)
    _check(options, nodes)
    _check_gpus(device, nodes, gpus)
    data_dir = (options.data_dir or default_data_dir()).expanduser().resolve()
    hosts = _hosts(options.hosts, nodes, capped=link_rate is not None)
    _check_leaves(options.leaves, hosts)
    return UpSettings(
        options=replace(
            _with_files(options),
            data_dir=data_dir,
            link_rate_bytes_s=link_rate,
            shm_dir=options.shm_dir.resolve(),
        ),
        nodes=nodes,
        hosts=hosts,
        device=device,
        data_dir=data_dir,
        cores=cores,
    )


def _check(options: Options, nodes: int) -> None:
    port, gateways, metrics = options.port, options.gateways, options.metrics_port
    if not os.access(options.shm_dir, os.W_OK | os.X_OK):
        raise UsageError(f"--shm-dir {options.shm_dir} is not a writable folder")
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"--nodes must be 1 to {MAX_NODES}, not {nodes}")
    if not 1 <= gateways <= MAX_GATEWAYS:
        raise UsageError(f"--gateways must be 1 to {MAX_GATEWAYS}, not {gateways}")
    if port and port + gateways - 1 > 65535:
        raise UsageError(f"--gateways {gateways} need {gateways} ports, from --port {port} to 65535 at most")
    if metrics and metrics + gateways - 1 > 65535:
        raise UsageError(f"--metrics-port {metrics}: each of the {gateways} gateways needs one, up to 65535")
    if metrics and port and abs(metrics - port) < gateways:
        raise UsageError(f"--metrics-port {metrics} and --port {port}: each gateway needs both")
    if options.redis_url is not None and options.appendfsync != "everysec":
        raise UsageError("--appendfsync is for the embedded Redis; configure the Redis of --redis-url itself")
    of_redis = (options.redis_password_file, options.redis_ca, options.redis_cert, options.redis_key)
    if options.redis_url is None and (any(of_redis) or options.redis_wait_replicas):
        raise UsageError(
            "--redis-password-file, --redis-ca, --redis-cert, --redis-key and --redis-wait-replicas "
            "are for the Redis of --redis-url"
        )
    if options.redis_url is not None and options.redis_memory_bytes is not None:
        raise UsageError("--redis-memory is for the embedded Redis; set maxmemory of that of --redis-url")
    try:
        tracing_settings(options)
    except InvalidRecord as error:
        raise UsageError(str(error)) from error


def _check_gpus(device: str, nodes: int, gpus: int) -> None:
    count = gpus_per_node(device)
    if count is not None and not gpus:
        raise UsageError(
            "no NVIDIA GPU is visible on this machine; use --device cpu, or see `hypercast doctor`"
        )
    if count is not None and nodes * count > gpus:
        each = "" if count == 1 else f" with {count} GPUs each"
        raise UsageError(f"--nodes {nodes}{each} is more than the {gpus} GPUs of this machine")


def _hosts(hosts: int | None, nodes: int, *, capped: bool) -> int | None:
    """Return the number of virtual hosts: one per node where links are capped. Raises UsageError."""
    if capped and hosts is None:
        hosts = nodes  # transfers between nodes of one host do not cross a link
    if hosts is not None and not 1 <= hosts <= nodes:
        raise UsageError(f"--hosts must be 1 to the number of nodes ({nodes}), not {hosts}")
    if capped and hosts != nodes:
        raise UsageError("--link-rate implies one virtual host per node; leave out --hosts")
    return hosts


def _check_leaves(leaves: int | None, hosts: int | None) -> None:
    if leaves is None:
        return
    if hosts is None:
        raise UsageError("--leaves needs --hosts or --link-rate: without, all nodes are on one host")
    if not 1 <= leaves <= hosts:
        raise UsageError(f"--leaves must be 1 to the number of hosts ({hosts}), not {leaves}")


def emulated_link_rate(device: str) -> int:
    """Return the link rate of an emulated device by its datasheet, at its scale. Raises UsageError."""
    try:
        wanted = parse_device(device)
        _, links = find_device(wanted)
    except InvalidRecord as error:
        raise UsageError(f"--device: {error}") from error
    return max(1, int(links.network / wanted.scale / wanted.slower))


def _with_files(options: Options) -> Options:
    """Return the options with absolute paths of files. Raises UsageError if those for TLS are unusable."""
    given = {name: getattr(options, name) for name in _FILES}
    options = replace(options, **{name: path and path.resolve() for name, path in given.items()})
    try:
        check_tls(tls_settings(options))
    except InvalidRecord as error:
        raise UsageError(str(error)) from error
    return options
