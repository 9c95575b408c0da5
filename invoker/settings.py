"""The invoker's settings, parsed once from flags and the environment."""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from invoker.base.errors import SettingsError
from invoker.emulated.profiles import find_device
from invoker.handlers.confine import CEILINGS, Sandbox
from invoker.kv.choice import KvPolicy
from rdmacast.protocol.handshake import Secret, secrets_of
from registry.config.command_line import parse_options, process_command
from registry.config.devices import gpu_indices, is_cuda
from registry.config.emulation import is_emulated, parse_device
from registry.config.function_yaml import parse_handler_limits
from registry.config.option_types import PlatformCommand
from registry.config.options import Options
from registry.config.rotation import cluster_secret
from registry.config.secrets import redis_password, secret_beside
from registry.config.tls import TlsSettings, tls_settings
from registry.errors import InvalidRecord
from registry.logs.lines import LogFormat
from registry.redis.sentinel import SCHEME as SENTINEL
from registry.tracing.settings import TracingSettings, tracing_settings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_REDIS_PORT = 6379
_RDMA = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}(:\d{1,3})?")

HELP = """Run one node: an invoker with one accelerator.

\b
Examples:
  # a node of the cluster whose Redis is on this machine
  hypercast invoker --redis-url unix:///srv/hypercast/redis.sock

\b
  # a GPU node on another machine: listen where the gateway can reach it
  HYPERCAST_CLUSTER_SECRET=... hypercast invoker --redis-url redis://10.0.0.5:6379/0 \\
      --listen 0.0.0.0:7400 --advertise 10.0.0.9 --device cuda:0 --host-memory 64GiB

\b
  # two virtual hosts on one machine
  hypercast invoker --redis-url URL --secret-file F --node-id n0 --host-id h0
  hypercast invoker --redis-url URL --secret-file F --node-id n1 --host-id h1
"""
# Fields of Options and of Settings.
_SAME = (
    *("cast_port", "stage_port", "gpu_memory_bytes", "host_memory_bytes", "spare_memory_bytes", "shm_dir"),
    *("link_rate_bytes_s", "rdma_required", "nixl", "allow_handlers", "threads", "nodes_hint"),
    *(
        "redis_wait_replicas",
        "lease_s",
        "grace_s",
        "keep_hot_s",
        "meter_interval_s",
        "step_timeout_s",
        "journal_dir",
        "log_level",
        "log_format",
        "vllm_memory_bytes",
        "no_vllm_preload",
        "disk_cache_bytes",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one invoker; None means the default for the machine (invoker/device.py)."""

    redis_url: str
    redis_wait_replicas: int
    secret: Secret = field(repr=False)
    redis_password: str = field(repr=False)
    node_id: str
    host_id: str
    listen_host: str
    listen_port: int
    cast_port: int
    stage_port: int
    advertise: str
    device: str
    gpu_memory_bytes: int | None
    host_memory_bytes: int | None
    spare_memory_bytes: int | None
    shm_dir: Path
    store_url: str | None
    link_rate_bytes_s: int | None
    rdma: str
    rdma_required: bool
    nixl: bool
    tls: TlsSettings
    allow_handlers: bool
    sandbox: Sandbox  # of handlers
    threads: int | None
    nodes_hint: int
    lease_s: float
    grace_s: float
    keep_hot_s: float
    meter_interval_s: float
    step_timeout_s: float
    kv_moves: KvPolicy
    journal_dir: Path | None
    log_level: str
    log_format: LogFormat = "text"
    tracing: TracingSettings = field(default_factory=TracingSettings)
    vllm_python: Path | None = None
    vllm_memory_bytes: int | None = None
    no_vllm_preload: bool = False
    disk_cache_bytes: int | None = None
    disk_cache_dir: Path = Path()
    leaf: str = ""
    scale_up_domain: str = ""
    checks_settle_s: float = 5.0  # without a start, before the check of a whole image begins

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """The cluster's secrets that are valid now, the newest first."""
        return secrets_of(self.secret)


COMMAND = process_command(PlatformCommand.INVOKER, HELP)


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Parse settings from flags and the environment. Raises SettingsError; `--help` exits."""
    try:
        return make_settings(parse_options(COMMAND, argv), environ)
    except InvalidRecord as error:
        raise SettingsError(str(error)) from error


def make_settings(options: Options, environ: Mapping[str, str]) -> Settings:
    """Return the settings of a node with these options. Raises SettingsError, InvalidRecord."""
    capped = options.link_rate_bytes_s is not None
    if options.rdma_required and (options.rdma == "off" or capped or options.nixl):
        raise SettingsError("--require-rdma cannot be combined with --rdma off, --link-rate or --nixl")
    if options.nixl and capped:
        raise SettingsError("--link-rate limits TCP only: it cannot be combined with --nixl")
    listen_host, listen_port = _address(options.listen)
    host_id = _name("--host-id", options.host_id or socket.gethostname())
    redis_url = options.redis_url or ""
    return Settings(
        **{name: getattr(options, name) for name in _SAME},
        redis_url=redis_url,
        redis_password=redis_password(options.redis_password_file, environ),
        secret=_secret(options.secret_file or secret_beside(redis_url), environ),
        node_id=_name("--node-id", options.node_id or f"{host_id[:50]}-{os.getpid()}"),
        host_id=host_id,
        disk_cache_dir=(options.disk_cache_dir or _default_disk_cache(environ)).expanduser().absolute(),
        leaf=_name("--leaf", options.leaf) if options.leaf else "",
        scale_up_domain=_name("--scale-up-domain", options.scale_up_domain)
        if options.scale_up_domain
        else "",
        listen_host=listen_host,
        listen_port=listen_port,
        advertise=options.advertise or _default_advertise(listen_host),
        device=_device(options.device),
        vllm_python=None if options.vllm_python is None else options.vllm_python.expanduser().absolute(),
        store_url=options.store,
        rdma=_rdma(options.rdma),
        tls=tls_settings(options),
        tracing=tracing_settings(options),
        kv_moves=KvPolicy(options.kv_moves),
        sandbox=_sandbox(options, redis_url),
    )


def _sandbox(options: Options, redis_url: str) -> Sandbox:
    """Return what handlers may do. Raises SettingsError if this machine cannot hold them to it."""
    redis = urlsplit(redis_url)
    if redis.scheme == SENTINEL and options.handler_network:
        raise SettingsError("--handler-network needs a Redis on a known port, not redis+sentinel://")
    try:
        redis_port = 0 if redis.scheme in ("unix", SENTINEL) else redis.port or _REDIS_PORT
    except ValueError as error:
        raise SettingsError(f"--redis-url: {error}") from error
    try:
        ceilings = parse_handler_limits(options.handler_limits, CEILINGS)
    except InvalidRecord as error:
        raise SettingsError(f"--handler-limits: {error}") from error
    sandbox = Sandbox(
        network=options.handler_network,
        redis_port=redis_port,
        unconfined=options.allow_unconfined_handlers,
        ceilings=ceilings,
    )
    if options.allow_handlers and not sandbox.unconfined:
        check_confinable(sandbox.missing())
    return sandbox


def check_confinable(missing: Sequence[str]) -> None:
    """Raise SettingsError if the kernel lacks parts of what confines handlers."""
    if missing:
        raise SettingsError(
            f"--allow-handlers: this machine cannot confine handlers. It lacks {'; and '.join(missing)}. "
            "With --allow-unconfined-handlers they run with what there is."
        )


def _secret(path: Path | None, environ: Mapping[str, str]) -> Secret:
    # A node joins a cluster: it must not create a secret that the gateway does not have.
    if path is not None and not path.is_file():
        raise SettingsError(f"--secret-file {path}: no such file (the gateway creates it at its first start)")
    try:
        return cluster_secret(path, environ)
    except (InvalidRecord, OSError) as error:
        raise SettingsError(str(error)) from error


def _default_disk_cache(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hypercast" / "images"


def _name(flag: str, text: str) -> str:
    if not _NAME.fullmatch(text):
        raise SettingsError(f"{flag}: {text!r} must be 1 to 63 letters, digits, '.', '_' or '-'")
    return text


def _device(text: str) -> str:
    if is_emulated(text):
        try:
            find_device(parse_device(text))
        except InvalidRecord as error:
            raise SettingsError(f"--device: {error}") from error
        return text
    if text not in ("auto", "cpu") and not is_cuda(text):
        raise SettingsError(f"--device: {text!r} is neither auto, cpu, cuda:N nor emulated:GPU")
    try:
        gpu_indices(text)
    except InvalidRecord as error:
        raise SettingsError(f"--device: {error}") from error
    return text


def _rdma(text: str) -> str:
    if not _RDMA.fullmatch(text):
        raise SettingsError(f"--rdma: {text!r} is neither auto, off, DEVICE nor DEVICE:PORT")
    return text


def _address(text: str) -> tuple[str, int]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host:
        raise SettingsError(f"--listen: {text!r} contains no address")
    if port and not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise SettingsError(f"--listen: {port!r} is not a number from 0 to 65535")
    return host, int(port or 0)


def _default_advertise(host: str) -> str:
    """Return the default advertised address: the host name if listening on all addresses."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host
