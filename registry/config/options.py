"""The options of `hypercast up`, `gateway` and `invoker`, each declared once.

`Options` is filled from the command line of one of them (`registry.config.command_line`). `up` hands it to
the gateways and nodes that it starts as one JSON argument.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import click
import msgspec

from registry.config.option_types import (
    DURATION,
    FILE,
    INTERVAL,
    LEASE,
    PORT,
    RATE,
    SIZE,
    Flag,
    PlatformCommand,
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
LOG_LEVEL = click.Choice(("debug", "info", "warning", "error"))


def default_data_dir() -> Path:
    """Return the data directory of `up` where none is given."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "hypercast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a platform's processes. None: the default depends on the machine or the cluster."""

    # --- the platform on one machine
    nodes: Annotated[
        int | None, Flag("--nodes", UP, "Number of nodes.", COUNT, shown="one per GPU, else 2")
    ] = None
    hosts: Annotated[
        int | None,
        Flag("--hosts", UP, "Number of virtual hosts to spread the nodes over.", COUNT, shown="none"),
    ] = None
    gateways: Annotated[
        int,
        Flag(
            "--gateways",
            UP,
            "Number of gateways, on consecutive ports from --port.",
            COUNT,
            shown="1",
        ),
    ] = 1
    appendfsync: Annotated[
        Literal["everysec", "always"],
        Flag(
            "--appendfsync",
            UP,
            "When the embedded Redis flushes its log to the disk.",
            click.Choice(("everysec", "always")),
            shown="everysec",
        ),
    ] = "everysec"

    # --- shared by the processes
    host: Annotated[str, Flag("--host", UP_GATEWAY, "Address to listen on.", shown="127.0.0.1")] = "127.0.0.1"
    port: Annotated[
        int,
        Flag(
            "--port",
            UP_GATEWAY,
            "Port to listen on (0: any free one).",
            PORT,
            defaults={PlatformCommand.GATEWAY: 8080},
            shown="8000",
        ),
    ] = 8000
    data_dir: Annotated[
        Path | None,
        Flag(
            "--data-dir",
            UP_GATEWAY,
            "Directory for state: Redis, models, logs, keys.",
            FILE,
            defaults={PlatformCommand.UP: default_data_dir},
            helps={PlatformCommand.GATEWAY: "Directory with admin.key and cluster.secret."},
            shown="~/.local/share/hypercast",
        ),
    ] = None
    redis_url: Annotated[
        str | None,
        Flag(
            "--redis-url",
            ALL,
            "Redis of the cluster: redis://HOST:PORT/DB or unix:///PATH.",
            required=GATEWAY_INVOKER,
            helps={PlatformCommand.UP: "Use this Redis instead of an embedded one."},
        ),
    ] = None
    secret_file: Annotated[
        Path | None,
        Flag(
            "--secret-file",
            GATEWAY_INVOKER,
            "File with the secret of the cluster.",
            FILE,
            shown="$HYPERCAST_CLUSTER_SECRET, or beside the data",
        ),
    ] = None
    store: Annotated[
        str | None,
        Flag(
            "--store",
            GATEWAY_INVOKER,
            "Blob store: a folder or an fsspec URL.",
            required=GATEWAY,
            helps={PlatformCommand.INVOKER: "URL of the blob store.  [default: the cluster's]"},
        ),
    ] = None
    grace_s: Annotated[
        float,
        Flag("--grace", GATEWAY_INVOKER, "Time for requests in flight on SIGTERM.", DURATION, shown="30s"),
    ] = 30.0
    log_level: Annotated[
        str, Flag("--log-level", GATEWAY_INVOKER, "Level of the log.", LOG_LEVEL, shown="info")
    ] = "info"

    # --- the gateway
    gateway_id: Annotated[
        str, Flag("--gateway-id", GATEWAY, "Name of this gateway in the cluster.", shown="a new one")
    ] = ""
    admin_key_file: Annotated[
        Path | None,
        Flag("--admin-key-file", GATEWAY, "File to write the first admin key to, mode 0600.", FILE),
    ] = None
    expect_nodes: Annotated[
        int, Flag("--expect-nodes", GATEWAY, "Number of nodes that /readyz waits for.", COUNT, shown="0")
    ] = 0
    linger_s: Annotated[
        float,
        Flag("--linger", GATEWAY, "Time to return 503 on SIGTERM before it ends.", DURATION, shown="0s"),
    ] = 0.0
    max_in_flight: Annotated[
        int, Flag("--max-in-flight", GATEWAY, "Most concurrent requests.", COUNT, shown="4096")
    ] = 4096
    max_body_bytes: Annotated[
        int, Flag("--max-body", GATEWAY, "Largest request body.", SIZE, shown="32MiB")
    ] = 32 << 20
    start_timeout_s: Annotated[
        float,
        Flag(
            "--start-timeout",
            GATEWAY,
            "Limit until the first output, or progress of the start.",
            DURATION,
            shown="300s",
        ),
    ] = 300.0
    idle_timeout_s: Annotated[
        float, Flag("--idle-timeout", GATEWAY, "Limit between two outputs.", DURATION, shown="60s")
    ] = 60.0
    total_timeout_s: Annotated[
        float, Flag("--total-timeout", GATEWAY, "Limit for a whole request.", DURATION, shown="30m")
    ] = 1800.0
    write_timeout_s: Annotated[
        float,
        Flag(
            "--write-timeout",
            GATEWAY,
            "Limit for a client that does not read its response.",
            DURATION,
            shown="60s",
        ),
    ] = 60.0
    cast_planner: Annotated[
        str | None,
        Flag(
            "--cast-planner",
            GATEWAY,
            "Planner of all casts, such as chain/512; for experiments.",
            metavar="NAME[/BLOCKS]",
            shown="chosen for each cast",
        ),
    ] = None
    usual_link_rate_bytes_s: Annotated[
        int | None,
        Flag(
            "--usual-link-rate",
            GATEWAY,
            "Rate of links until casts have measured them, such as 25gbit.",
            RATE,
            shown="10gbit",
        ),
    ] = None

    # --- the node
    node_id: Annotated[
        str | None,
        Flag("--node-id", INVOKER, "Name of this node in the cluster.", shown="host name and process id"),
    ] = None
    host_id: Annotated[
        str | None,
        Flag("--host-id", INVOKER, "Host; nodes of one host share a host tier.", shown="the host name"),
    ] = None
    listen: Annotated[
        str,
        Flag(
            "--listen",
            INVOKER,
            "Address of the channel to gateways.",
            metavar="ADDR[:PORT]",
            shown="127.0.0.1, any port",
        ),
    ] = "127.0.0.1"
    cast_port: Annotated[
        int, Flag("--cast-port", INVOKER, "Port for transfers of images (0: any).", PORT, shown="0")
    ] = 0
    stage_port: Annotated[
        int,
        Flag("--stage-port", INVOKER, "Port for links between pipeline stages (0: any).", PORT, shown="0"),
    ] = 0
    advertise: Annotated[
        str | None,
        Flag("--advertise", INVOKER, "Address at which others reach this node.", shown="that of --listen"),
    ] = None
    device: Annotated[
        str,
        Flag(
            "--device",
            UP_INVOKER,
            "Accelerator: auto, cpu, cuda:N or emulated:GPU.",
            helps={PlatformCommand.UP: "Accelerator: auto, cpu, cuda or emulated:GPU."},
            shown="auto",
        ),
    ] = "auto"
    gpu_memory_bytes: Annotated[
        int | None,
        Flag(
            "--gpu-memory",
            UP_INVOKER,
            "GPU memory per node, such as 2GiB.",
            SIZE,
            shown="what fits the device",
        ),
    ] = None
    host_memory_bytes: Annotated[
        int | None,
        Flag(
            "--host-memory",
            UP_INVOKER,
            "Host-memory cache per host, such as 8GiB.",
            SIZE,
            shown="a quarter of --shm-dir",
        ),
    ] = None
    spare_memory_bytes: Annotated[
        int | None,
        Flag(
            "--spare-memory",
            INVOKER,
            "Free host memory kept pre-faulted for the next image (0B: none).",
            SIZE,
            shown="up to 1GiB",
        ),
    ] = None
    shm_dir: Annotated[
        Path, Flag("--shm-dir", UP_INVOKER, "Directory of the host-memory cache.", FILE, shown="/dev/shm")
    ] = Path("/dev/shm")
    link_rate_bytes_s: Annotated[
        int | None,
        Flag(
            "--link-rate",
            UP_INVOKER,
            "Cap on model transfers per node, such as 10mbit; for experiments.",
            RATE,
            shown="none",
        ),
    ] = None
    rdma: Annotated[
        str, Flag("--rdma", INVOKER, "RDMA device: auto, off or DEVICE[:PORT].", shown="auto")
    ] = "auto"
    rdma_required: Annotated[
        bool, Flag("--require-rdma", INVOKER, "Do not start without RDMA, and use no TCP to other hosts.")
    ] = False
    nixl: Annotated[
        bool, Flag("--nixl", INVOKER, "Read by NIXL where both ends have it and RDMA is not available.")
    ] = False
    cast_tls_cert: Annotated[
        Path | None,
        Flag(
            "--cast-tls-cert", UP_INVOKER, "Certificate of the node: TLS for all links between nodes.", FILE
        ),
    ] = None
    cast_tls_key: Annotated[
        Path | None, Flag("--cast-tls-key", UP_INVOKER, "Private key of the certificate.", FILE)
    ] = None
    cast_tls_ca: Annotated[
        Path | None, Flag("--cast-tls-ca", UP_INVOKER, "Authority that signed the nodes' certificates.", FILE)
    ] = None
    allow_handlers: Annotated[
        bool, Flag("--allow-handlers", UP_INVOKER, "Allow functions that bring their own code.")
    ] = False
    threads: Annotated[
        int | None,
        Flag("--threads", INVOKER, "Compute threads.", NODE_COUNT, shown="cores divided by --nodes-hint"),
    ] = None
    nodes_hint: Annotated[
        int, Flag("--nodes-hint", INVOKER, "Number of nodes on this machine.", NODE_COUNT, shown="1")
    ] = 1
    lease_s: Annotated[
        float,
        Flag(
            "--lease-s",
            INVOKER,
            "Lifetime of the node's lease in seconds.",
            LEASE,
            shown="6",
        ),
    ] = 6.0
    keep_hot_s: Annotated[
        float, Flag("--keep-hot", INVOKER, "Time to keep an idle image in GPU memory.", DURATION, shown="0s")
    ] = 0.0
    meter_interval_s: Annotated[
        float,
        Flag(
            "--meter-interval",
            UP_INVOKER,
            "Interval of usage records per instance, such as 10s.",
            INTERVAL,
            shown="60s",
        ),
    ] = 60.0
    step_timeout_s: Annotated[
        float,
        Flag(
            "--step-timeout",
            INVOKER,
            "Restart the node if one engine step takes longer.",
            INTERVAL,
            shown="120s",
        ),
    ] = 120.0
    kv_moves: Annotated[
        str,
        Flag(
            "--kv-moves",
            UP_INVOKER,
            "When a request moves to another node: transfer its KV cache (always), recompute it (never), "
            "or what is faster (auto).",
            click.Choice(("auto", "always", "never")),
            shown="auto",
        ),
    ] = "auto"
    journal_dir: Annotated[
        Path | None,
        Flag(
            "--journal-dir",
            INVOKER,
            "Directory of the metering journal, to survive a reboot.",
            FILE,
            shown="in memory, under --shm-dir",
        ),
    ] = None


FLAGS: Mapping[str, Flag] = {
    name: next(part for part in kind.__metadata__ if isinstance(part, Flag))
    for name, kind in get_type_hints(Options, include_extras=True).items()
}


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
