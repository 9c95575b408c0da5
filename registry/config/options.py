"""The options of `hypercast up`, `gateway` and `invoker`, each declared once.

`Options` is filled from the command line of one of them (`registry.config.command_line`). `up` hands it to
the gateways and nodes that it starts as one JSON argument.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import click
import msgspec

from registry.config.option_types import (
    DURATION,
    FILE,
    INTERVAL,
    LEASE,
    PORT,
    RATE,
    SHARE,
    SIZE,
    Flag,
    PlatformCommand,
    flag,
    whole_number,
)
from registry.errors import InvalidRecord

UP = (PlatformCommand.UP,)
GATEWAY = (PlatformCommand.GATEWAY,)
INVOKER = (PlatformCommand.INVOKER,)
UP_GATEWAY = (*UP, *GATEWAY)
UP_INVOKER = (*UP, *INVOKER)
GATEWAY_INVOKER = (*GATEWAY, *INVOKER)
ALL = (*UP, *GATEWAY, *INVOKER)
COUNT = whole_number("n", 0, 1 << 31)
NODE_COUNT = whole_number("n", 1, 4096)
LOG_COUNT = whole_number("n", 1, 100)
LOG_LEVEL = click.Choice(("debug", "info", "warning", "error"))


def default_data_dir() -> Path:
    """Return the data directory of `up` where none is given."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "hypercast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a platform's processes. None: the default depends on the machine or the cluster."""

    # --- the platform on one machine
    nodes: int | None = flag("--nodes", UP, "Number of nodes.", COUNT, shown="one per GPU, else 2")
    hosts: int | None = flag(
        "--hosts", UP, "Number of virtual hosts to spread the nodes over.", COUNT, shown="none"
    )
    leaves: int | None = flag(
        "--leaves",
        UP,
        "Number of leaf switches to name for the virtual hosts; for experiments.",
        COUNT,
        shown="none",
    )
    gateways: int = flag(
        "--gateways", UP, "Number of gateways, on consecutive ports from --port.", COUNT, default=1
    )
    appendfsync: Literal["everysec", "always"] = flag(
        "--appendfsync",
        UP,
        "When the embedded Redis flushes its log to the disk.",
        click.Choice(("everysec", "always")),
        default="everysec",
    )
    redis_memory_bytes: int | None = flag(
        "--redis-memory",
        UP,
        "Most memory of the embedded Redis (its maxmemory); requests are refused beyond it.",
        SIZE,
        shown="half of the machine's",
    )

    log_bytes: int = flag(
        "--log-size", UP, "Size from which a log file is rotated (0B: never).", SIZE, default="64MiB"
    )
    log_files: int = flag("--log-files", UP, "Older files kept of each log.", LOG_COUNT, default=4)

    # --- shared by the processes
    host: str = flag("--host", UP_GATEWAY, "Address to listen on.", default="127.0.0.1")
    port: int = flag(
        "--port",
        UP_GATEWAY,
        "Port to listen on (0: any free one).",
        PORT,
        default=8000,
        defaults={PlatformCommand.GATEWAY: 8080},
    )
    metrics_port: int | None = flag(
        "--metrics-port",
        UP_GATEWAY,
        "Port for /metrics and /health without a key, which leave --port (0: any free one).",
        PORT,
        shown="none",
    )
    metrics_host: str | None = flag(
        "--metrics-host", UP_GATEWAY, "Address for --metrics-port.", shown="that of --host"
    )
    vllm_metrics: bool = flag(
        "--vllm-metrics",
        UP_GATEWAY,
        "Export metrics by vLLM's names, too, such as vllm:num_requests_running.",
        default=False,
    )
    tenant_metrics: int = flag(
        "--tenant-metrics",
        UP_GATEWAY,
        "Number of tenants that have metrics of their own; all others share one row.",
        whole_number("n", 0, 1000),
        default=0,
    )
    tls_cert: Path | None = flag(
        "--tls-cert", UP_GATEWAY, "Certificate chain of the HTTP port, which then speaks HTTPS only.", FILE
    )
    tls_key: Path | None = flag("--tls-key", UP_GATEWAY, "Private key of that certificate.", FILE)
    data_dir: Path | None = flag(
        "--data-dir",
        UP_GATEWAY,
        "Directory for state: Redis, models, logs, keys.",
        FILE,
        shown="~/.local/share/hypercast",
        defaults={PlatformCommand.UP: default_data_dir},
        helps={PlatformCommand.GATEWAY: "Directory with admin.key and cluster.secret."},
    )
    redis_url: str | None = flag(
        "--redis-url",
        ALL,
        "Redis of the cluster: redis://HOST:PORT/DB, unix:///PATH or "
        "redis+sentinel://HOST:PORT,HOST:PORT/NAME; rediss:// with TLS.",
        required=GATEWAY_INVOKER,
        helps={PlatformCommand.UP: "Use this Redis instead of an embedded one."},
    )
    redis_password_file: Path | None = flag(
        "--redis-password-file",
        ALL,
        "File with the password of the Redis of --redis-url.",
        FILE,
        shown="$HYPERCAST_REDIS_PASSWORD",
    )
    redis_ca: Path | None = flag(
        "--redis-ca",
        ALL,
        "Authority that signed the certificate of a rediss:// Redis.",
        FILE,
        shown="the system's",
    )
    redis_cert: Path | None = flag("--redis-cert", ALL, "Certificate to present to Redis.", FILE)
    redis_key: Path | None = flag("--redis-key", ALL, "Private key of that certificate.", FILE)
    redis_wait_replicas: int = flag(
        "--redis-wait-replicas",
        ALL,
        "Replicas of Redis that acknowledge a usage record before it counts as written.",
        COUNT,
        default=0,
    )
    channel_tls_cert: Path | None = flag(
        "--channel-tls-cert", ALL, "Certificate of this process: TLS between gateways and nodes.", FILE
    )
    channel_tls_key: Path | None = flag(
        "--channel-tls-key", ALL, "Private key of the certificate for channels.", FILE
    )
    channel_tls_ca: Path | None = flag(
        "--channel-tls-ca", ALL, "Authority that signed the certificates of gateways and nodes.", FILE
    )
    secret_file: Path | None = flag(
        "--secret-file",
        GATEWAY_INVOKER,
        "File with the secret of the cluster.",
        FILE,
        shown="$HYPERCAST_CLUSTER_SECRET, or beside the data",
    )
    store: str | None = flag(
        "--store",
        GATEWAY_INVOKER,
        "Blob store: a folder or an fsspec URL.",
        required=GATEWAY,
        helps={PlatformCommand.INVOKER: "URL of the blob store.  [default: the cluster's]"},
    )
    grace_s: float = flag(
        "--grace", GATEWAY_INVOKER, "Time for requests in flight on SIGTERM.", DURATION, default="30s"
    )
    log_level: str = flag("--log-level", GATEWAY_INVOKER, "Level of the log.", LOG_LEVEL, default="info")
    log_format: Literal["text", "json"] = flag(
        "--log-format",
        ALL,
        "Lines of the log: text, or JSON with the ids of request and trace.",
        click.Choice(("text", "json")),
        default="text",
    )
    otlp_endpoint: str | None = flag(
        "--otlp-endpoint",
        ALL,
        "Collector that gets traces by OTLP over HTTP, such as http://127.0.0.1:4318.",
        shown="no traces",
        metavar="URL",
    )
    trace_sample: float = flag(
        "--trace-sample",
        UP_GATEWAY,
        "Share of the requests to trace, 0 to 1, beside those that their callers trace.",
        SHARE,
        default="1",
    )
    trace_rate: int = flag(
        "--trace-rate", UP_GATEWAY, "Most requests that a gateway traces a second.", COUNT, default=20
    )

    # --- the gateway
    gateway_id: str = flag(
        "--gateway-id", GATEWAY, "Name of this gateway in the cluster.", default="", shown="a new one"
    )
    admin_key_file: Path | None = flag(
        "--admin-key-file", GATEWAY, "File to write the first admin key to, mode 0600.", FILE
    )
    expect_nodes: int = flag(
        "--expect-nodes", GATEWAY, "Number of nodes that /readyz waits for.", COUNT, default=0
    )
    linger_s: float = flag(
        "--linger", GATEWAY, "Time to return 503 on SIGTERM before it ends.", DURATION, default="0s"
    )
    max_in_flight: int = flag("--max-in-flight", GATEWAY, "Most concurrent requests.", COUNT, default=4096)
    max_connections: int = flag(
        "--max-connections", GATEWAY, "Most open connections of clients.", COUNT, default=8192
    )
    body_memory_bytes: int = flag(
        "--body-memory", GATEWAY, "Memory for the bodies of all requests.", SIZE, default="512MiB"
    )
    max_body_bytes: int = flag("--max-body", GATEWAY, "Largest request body.", SIZE, default="32MiB")
    start_timeout_s: float = flag(
        "--start-timeout",
        GATEWAY,
        "Limit until the first output, or progress of the start.",
        DURATION,
        default="300s",
    )
    idle_timeout_s: float = flag(
        "--idle-timeout", GATEWAY, "Limit between two outputs.", DURATION, default="60s"
    )
    total_timeout_s: float = flag(
        "--total-timeout", GATEWAY, "Limit for a whole request.", DURATION, default="30m"
    )
    write_timeout_s: float = flag(
        "--write-timeout",
        GATEWAY,
        "Limit for a client that does not read its response.",
        DURATION,
        default="60s",
    )
    cast_planner: str | None = flag(
        "--cast-planner",
        GATEWAY,
        "Planner of all casts, such as chain/512; for experiments.",
        shown="chosen for each cast",
        metavar="NAME[/BLOCKS]",
    )
    usual_link_rate_bytes_s: int | None = flag(
        "--usual-link-rate",
        GATEWAY,
        "Rate of links until casts have measured them, such as 25gbit.",
        RATE,
        shown="10gbit",
    )
    served_copies_bytes: int = flag(
        "--served-copies",
        UP_GATEWAY,
        "Host memory per host for copies of models that its accelerators hold and serve.",
        SIZE,
        default="0B",
    )
    drain_calls: str = flag(
        "--drain-calls",
        UP_GATEWAY,
        "Running generations of an instance that is to stop: continue on other instances (move), or end "
        "there (finish).",
        click.Choice(("move", "finish")),
        default="move",
    )

    jobs_at_once: int = flag(
        "--jobs-at-once",
        UP_GATEWAY,
        "Queued calls that a gateway runs at once, beside those of clients (0: none).",
        whole_number("n", 0, 4096),
        default=32,
    )
    jobs_memory_bytes: int = flag(
        "--jobs-memory",
        UP_GATEWAY,
        "Memory of Redis for queued calls and their results; a tenant gets half.",
        SIZE,
        default="256MiB",
    )
    jobs_keep_s: float = flag(
        "--jobs-keep", UP_GATEWAY, "Time to keep the result of a queued call.", DURATION, default="24h"
    )
    files_size_bytes: int = flag(
        "--files-size",
        UP_GATEWAY,
        "Room in the store for files of callers and batches; a tenant gets half.",
        SIZE,
        default="10GiB",
    )
    files_keep_s: float = flag(
        "--files-keep",
        UP_GATEWAY,
        "Time to keep files, and batches that have ended.",
        DURATION,
        default="720h",
    )
    webhook_allow: str = flag(
        "--webhook-allow",
        UP_GATEWAY,
        "Hosts and private networks that webhooks may go to, such as hooks.local,10.0.0.0/8.",
        default="",
        shown="none",
        metavar="LIST",
    )

    # --- the node
    node_id: str | None = flag(
        "--node-id", INVOKER, "Name of this node in the cluster.", shown="host name and process id"
    )
    host_id: str | None = flag(
        "--host-id", INVOKER, "Host; nodes of one host share a host tier.", shown="the host name"
    )
    leaf: str | None = flag(
        "--leaf",
        INVOKER,
        "Leaf switch of the node: casts send one copy into each.",
        shown="none",
        metavar="NAME",
    )
    scale_up_domain: str | None = flag(
        "--scale-up-domain",
        INVOKER,
        "Nodes whose accelerators have a fast link of their own, such as NVLink: casts send each a part.",
        shown="none",
        metavar="NAME",
    )
    listen: str = flag(
        "--listen",
        INVOKER,
        "Address of the channel to gateways.",
        default="127.0.0.1",
        shown="127.0.0.1, any port",
        metavar="ADDR[:PORT]",
    )
    cast_port: int = flag("--cast-port", INVOKER, "Port for transfers of images (0: any).", PORT, default=0)
    stage_port: int = flag(
        "--stage-port", INVOKER, "Port for links between pipeline stages (0: any).", PORT, default=0
    )
    advertise: str | None = flag(
        "--advertise", INVOKER, "Address at which others reach this node.", shown="that of --listen"
    )
    device: str = flag(
        "--device",
        UP_INVOKER,
        "Accelerator: auto, cpu, cuda:N (cuda:N,M for several GPUs) or emulated:GPU.",
        default="auto",
        helps={
            PlatformCommand.UP: "Accelerator: auto, cpu, cuda (cudaxN for N GPUs a node) or emulated:GPU."
        },
    )
    gpu_memory_bytes: int | None = flag(
        "--gpu-memory", UP_INVOKER, "GPU memory per node, such as 2GiB.", SIZE, shown="what fits the device"
    )
    host_memory_bytes: int | None = flag(
        "--host-memory",
        UP_INVOKER,
        "Host-memory cache per host, such as 8GiB.",
        SIZE,
        shown="a quarter of --shm-dir",
    )
    disk_cache_bytes: int | None = flag(
        "--disk-cache",
        UP_INVOKER,
        "Disk tier per host, such as 200GiB: models that were verified in memory are kept there.",
        SIZE,
        shown="none",
    )
    disk_cache_dir: Path | None = flag(
        "--disk-cache-dir",
        UP_INVOKER,
        "Directory of the disk tier.",
        FILE,
        shown="~/.cache/hypercast/images",
        helps={PlatformCommand.UP: "Directory of the disk tier.  [default: in --data-dir]"},
    )
    spare_memory_bytes: int | None = flag(
        "--spare-memory",
        INVOKER,
        "Free host memory kept pre-faulted for the next image (0B: none).",
        SIZE,
        shown="up to 1GiB",
    )
    shm_dir: Path = flag(
        "--shm-dir", UP_INVOKER, "Directory of the host-memory cache.", FILE, default="/dev/shm"
    )
    link_rate_bytes_s: int | None = flag(
        "--link-rate",
        UP_INVOKER,
        "Cap on model transfers per node, such as 10mbit; for experiments.",
        RATE,
        shown="none",
    )
    rdma: str = flag("--rdma", INVOKER, "RDMA device: auto, off or DEVICE[:PORT].", default="auto")
    rdma_required: bool = flag(
        "--require-rdma", INVOKER, "Do not start without RDMA, and use no TCP to other hosts.", default=False
    )
    nixl: bool = flag(
        "--nixl", INVOKER, "Read by NIXL where both ends have it and RDMA is not available.", default=False
    )
    cast_tls_cert: Path | None = flag(
        "--cast-tls-cert", UP_INVOKER, "Certificate of the node: TLS for all links between nodes.", FILE
    )
    cast_tls_key: Path | None = flag("--cast-tls-key", UP_INVOKER, "Private key of the certificate.", FILE)
    cast_tls_ca: Path | None = flag(
        "--cast-tls-ca", UP_INVOKER, "Authority that signed the nodes' certificates.", FILE
    )
    allow_handlers: bool = flag(
        "--allow-handlers", UP_INVOKER, "Allow functions that bring their own code.", default=False
    )
    handler_network: bool = flag(
        "--handler-network",
        UP_INVOKER,
        "Let handlers use the network (TCP and UDP), except for the port of Redis.",
        default=False,
    )
    handler_limits: str = flag(
        "--handler-limits",
        UP_INVOKER,
        "Ceilings on the limits of handlers, such as 'memory: 8GiB, cpu: 10m'.",
        default="",
        shown="see the documentation",
        metavar="LIMITS",
    )
    allow_unconfined_handlers: bool = flag(
        "--allow-unconfined-handlers",
        UP_INVOKER,
        "Run handlers even where the kernel lacks a part of what confines them.",
        default=False,
    )
    vllm_python: Path | None = flag(
        "--vllm-python",
        UP_INVOKER,
        "Python of an environment that has vLLM, for functions with engine: vllm.",
        FILE,
        shown="none",
    )
    vllm_memory_bytes: int | None = flag(
        "--vllm-memory",
        UP_INVOKER,
        "Most memory of all vLLM servers of a node together, such as 24GiB.",
        SIZE,
        shown="the node's share of half of the machine's",
    )
    no_vllm_preload: bool = flag(
        "--no-vllm-preload",
        UP_INVOKER,
        "Import vLLM with each server, not once: saves half a gigabyte a node, costs seconds a start.",
        default=False,
    )
    threads: int | None = flag(
        "--threads", INVOKER, "Compute threads.", NODE_COUNT, shown="cores divided by --nodes-hint"
    )
    nodes_hint: int = flag("--nodes-hint", INVOKER, "Number of nodes on this machine.", NODE_COUNT, default=1)
    lease_s: float = flag(
        "--lease-s", INVOKER, "Lifetime of the node's lease in seconds.", LEASE, default="6"
    )
    keep_hot_s: float = flag(
        "--keep-hot",
        UP_INVOKER,
        "Time to keep an idle image in GPU memory, unless its room is needed.",
        DURATION,
        default="5m",
    )
    meter_interval_s: float = flag(
        "--meter-interval",
        UP_INVOKER,
        "Interval of usage records per instance, such as 10s.",
        INTERVAL,
        default="60s",
    )
    step_timeout_s: float = flag(
        "--step-timeout",
        INVOKER,
        "Restart the node if one engine step takes longer.",
        INTERVAL,
        default="120s",
    )
    kv_moves: str = flag(
        "--kv-moves",
        UP_INVOKER,
        "When a request moves to another node: transfer its KV cache (always), recompute it (never), "
        "or what is faster (auto).",
        click.Choice(("auto", "always", "never")),
        default="auto",
    )
    journal_dir: Path | None = flag(
        "--journal-dir",
        INVOKER,
        "Directory of the metering journal, to survive a reboot.",
        FILE,
        shown="in memory, under --shm-dir",
    )


FLAGS: Mapping[str, Flag] = {one.name: one.metadata["flag"] for one in fields(Options)}


def encode_options(options: Options) -> str:
    """Return the options that differ from their defaults as JSON."""
    changed = {
        one.name: value for one in fields(Options) if (value := getattr(options, one.name)) != one.default
    }
    return msgspec.json.encode(changed, enc_hook=str).decode()


def decode_options(text: str) -> Options:
    """Return the options that `encode_options` made into JSON. Raises InvalidRecord."""
    try:
        return msgspec.json.decode(text, type=Options, dec_hook=lambda kind, value: kind(value))
    except msgspec.DecodeError as error:
        raise InvalidRecord(f"bad options: {error}") from error
