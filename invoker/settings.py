"""The invoker's settings: parsed once from flags and the environment, then passed down."""

import argparse
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from invoker.emulated.profiles import known_device
from invoker.errors import SettingsError
from invoker.stages.kv_choice import KvPolicy
from rdmacast.tls import TlsFiles
from registry.arguments import argument, number, tcp_port
from registry.durations import parse_duration
from registry.emulation import is_emulated, parse_device
from registry.errors import InvalidRecord
from registry.secrets import load_or_create_secret, secret_beside
from registry.sizes import parse_rate, parse_size

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_RDMA = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}(:\d{1,3})?")

EXAMPLES = """\
examples:
  # a node of the cluster whose Redis is on this machine
  python -m invoker --redis-url unix:///srv/hypercast/redis.sock --secret-file /srv/hypercast/cluster.secret

  # a GPU node on another machine: listen where the gateway can reach it
  HYPERCAST_CLUSTER_SECRET=... python -m invoker --redis-url redis://10.0.0.5:6379/0 \\
      --listen 0.0.0.0:7400 --advertise 10.0.0.9 --device cuda:0 --gpu-memory 70GiB --host-memory 64GiB

  # two virtual hosts on one machine
  python -m invoker --redis-url URL --secret-file F --node-id n0 --host-id h0
  python -m invoker --redis-url URL --secret-file F --node-id n1 --host-id h1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an invoker was told. None means: the default that fits the machine (invoker/device.py)."""

    redis_url: str
    secret: bytes
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
    cast_tls: TlsFiles | None
    allow_handlers: bool
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


class _Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process, so that settings can be parsed anywhere."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message} (see --help)")


def parse_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Settings from flags and the environment. Raises SettingsError; `--help` exits."""
    given = _parser().parse_args(argv)
    if given.require_rdma and (given.rdma == "off" or given.link_rate or given.nixl):
        raise SettingsError("--require-rdma goes with neither --rdma off nor --link-rate nor --nixl")
    if given.nixl and given.link_rate:
        raise SettingsError("--link-rate caps TCP only: it does not go with --nixl")
    listen_host, listen_port = given.listen
    host_id = given.host_id or socket.gethostname()
    return Settings(
        redis_url=given.redis_url,
        secret=_secret(given.secret_file or secret_beside(given.redis_url), environ),
        node_id=given.node_id or f"{host_id[:50]}-{os.getpid()}",
        host_id=host_id,
        listen_host=listen_host,
        listen_port=listen_port,
        cast_port=given.cast_port,
        stage_port=given.stage_port,
        advertise=given.advertise or _reachable(listen_host),
        device=given.device,
        gpu_memory_bytes=given.gpu_memory,
        host_memory_bytes=given.host_memory,
        spare_memory_bytes=given.spare_memory,
        shm_dir=given.shm_dir,
        store_url=given.store,
        link_rate_bytes_s=given.link_rate,
        rdma=given.rdma,
        rdma_required=given.require_rdma,
        nixl=given.nixl,
        cast_tls=_tls_files(given.cast_tls_cert, given.cast_tls_key, given.cast_tls_ca),
        allow_handlers=given.allow_handlers,
        threads=given.threads,
        nodes_hint=given.nodes_hint,
        lease_s=given.lease_s,
        grace_s=given.grace,
        keep_hot_s=given.keep_hot,
        meter_interval_s=given.meter_interval,
        step_timeout_s=given.step_timeout,
        kv_moves=KvPolicy(given.kv_moves),
        journal_dir=given.journal_dir,
        log_level=given.log_level,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hypercast invoker",
        description="Run one node: an invoker with one accelerator.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    size, rate, duration = argument(parse_size), argument(parse_rate), argument(parse_duration)
    count = number(1, 4096)
    add = parser.add_argument
    add("--redis-url", required=True, help="the cluster's Redis: redis://host:port/db or unix:///path")
    add(
        "--secret-file",
        type=Path,
        help="the cluster's secret (default: $HYPERCAST_CLUSTER_SECRET, or beside a unix:// socket)",
    )
    add("--node-id", type=_name, help="a name of its own (default: host and process id)")
    add("--host-id", type=_name, help="nodes with equal host share one host tier (default: the host name)")
    add("--listen", type=_address, default=("127.0.0.1", 0), help="ADDR[:PORT] (default: 127.0.0.1)")
    add("--cast-port", type=tcp_port, default=0, help="port of the region server (default: any)")
    add("--stage-port", type=tcp_port, default=0, help="port for links between stages (default: any)")
    add("--advertise", help="address that others reach this node at (default: the one listened on)")
    add("--device", type=_device, default="auto", help="auto, cpu, cuda:N or emulated:GPU (default: auto)")
    add(
        "--gpu-memory",
        type=size,
        help="size of the arena, as 2GiB (default: what fits the device)",
    )
    add(
        "--host-memory",
        type=size,
        help="limit of the host tier (default: a quarter of --shm-dir's size)",
    )
    add(
        "--spare-memory",
        type=size,
        help="of the host tier's free memory, kept ready for the next image; 0B: none (default: up to 1GiB)",
    )
    add("--shm-dir", type=Path, default=Path("/dev/shm"), help="where the host tier lies (default: /dev/shm)")
    add("--store", help="URL of the blob store (default: the cluster's)")
    add("--link-rate", type=rate, help="cap on model transfers, as 10mbit; for experiments")
    add("--rdma", type=_rdma, default="auto", help="auto, off, or DEVICE[:PORT] (default: auto)")
    add("--require-rdma", action="store_true", help="no TCP to other hosts; without RDMA do not start")
    add("--nixl", action="store_true", help="read by NIXL where both ends have it and RDMA is not to be had")
    add(
        "--cast-tls-cert",
        type=Path,
        help="this node's certificate: TLS for all that nodes read from each other",
    )
    add("--cast-tls-key", type=Path, help="the certificate's key")
    add("--cast-tls-ca", type=Path, help="the authority whose certificates other nodes must show")
    add("--allow-handlers", action="store_true", help="run users' own handler code on this node")
    add("--threads", type=count, help="compute threads (default: cores divided by --nodes-hint)")
    add("--nodes-hint", type=count, default=1, help="how many nodes share this machine (default: 1)")
    add("--lease-s", type=_positive, default=6.0, help="life of the node's lease in seconds (default: 6)")
    add(
        "--grace",
        type=duration,
        default=30.0,
        help="time for work under way at the end (default: 30s)",
    )
    add(
        "--keep-hot",
        type=duration,
        default=0.0,
        help="keep an idle image on the device (default: 0s)",
    )
    add(
        "--meter-interval",
        type=_interval,
        default=60.0,
        help="at least this often the ledger hears of an instance's time (default: 60s)",
    )
    add(
        "--step-timeout",
        type=_interval,
        default=120.0,
        help="a step of an engine that takes longer hangs, and the node ends (default: 120s)",
    )
    add(
        "--kv-moves",
        choices=tuple(KvPolicy),
        default=KvPolicy.AUTO,
        help="fetch K and V of calls that leave a pipeline for this node: auto, where that is cheaper "
        "than computing them (default), always or never",
    )
    add(
        "--journal-dir",
        type=Path,
        help="where the meter's journal lies, to outlive the process (default: in memory, under --shm-dir)",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _secret(path: Path | None, environ: Mapping[str, str]) -> bytes:
    # A node joins a cluster: it never makes up a secret that the gateway would not know.
    if path is not None and not path.is_file():
        raise SettingsError(f"--secret-file {path}: no such file (the gateway makes it at its first start)")
    try:
        return load_or_create_secret(path, environ)
    except (InvalidRecord, OSError) as error:
        raise SettingsError(f"the cluster's secret: {error}") from error


def _tls_files(cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise SettingsError("--cast-tls-cert, --cast-tls-key and --cast-tls-ca belong together")
    return TlsFiles(cert=cert, key=key, ca=ca)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 to 63 letters, digits, '.', '_' or '-'")
    return text


def _device(text: str) -> str:
    if is_emulated(text):
        try:
            known_device(parse_device(text))
        except InvalidRecord as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text
    if not _DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto, cpu, cuda:N nor emulated:GPU")
    return text


def _rdma(text: str) -> str:
    if not _RDMA.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto, off, DEVICE nor DEVICE:PORT")
    return text


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600")
    return value


def _interval(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except InvalidRecord as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not 0.1 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is not between 100ms and 24h")
    return seconds


def _address(text: str) -> tuple[str, int]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if not host:
        raise argparse.ArgumentTypeError(f"{text!r} names no address")
    return host, tcp_port(port) if port else 0


def _reachable(host: str) -> str:
    """The address that others can reach: a node that listens everywhere is known by its host's name."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host
