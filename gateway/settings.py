"""The gateway's settings: flags, parsed once into frozen dataclasses."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.contract import Deadlines
from gateway.fixed_plan import FixedPlan, parse_fixed_plan
from registry.arguments import argument, number, tcp_port
from registry.durations import parse_duration
from registry.errors import InvalidRecord
from registry.secrets import load_or_create_secret
from registry.sizes import parse_rate, parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonBounds:
    """How much a JSON body may hold, so that decoding it never holds the event loop up for long."""

    containers: int  # arrays and objects
    strings: int  # keys among them
    commas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one request may bring or ask for. Texts are bodies of completions, chat and embeddings."""

    body_bytes: int = 32 << 20
    text_bytes: int = 4 << 20
    text_json: JsonBounds = JsonBounds(containers=1 << 16, strings=1 << 17, commas=1 << 19)
    image_json: JsonBounds = JsonBounds(containers=200_000, strings=1 << 17, commas=1 << 20)
    handler_json: JsonBounds = JsonBounds(containers=1 << 20, strings=1 << 20, commas=1 << 23)
    body_idle_s: float = 30.0  # a body of which nothing comes for so long is given up
    body_total_s: float = 300.0  # a body, uploads excepted, must have come by then
    upload_bytes: int = 1 << 40
    json_depth: int = 64
    calls: int = 128  # prompts x choices of one request
    messages: int = 4096
    inputs: int = 2048  # texts of one embeddings request
    inline_chars: int = 2048  # texts up to this length are tokenised without a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How event streams behave while there is nothing to say."""

    head_wait_s: float = 1.0  # how long the response head waits for an instance to be assigned
    stage_every_s: float = 0.25
    keepalive_s: float = 15.0
    write_timeout_s: float = 60.0  # a client that takes nothing for so long has left


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Everything a gateway is told at its start."""

    host: str = "127.0.0.1"
    port: int = 8080
    gateway_id: str = ""
    redis_url: str = ""
    store: str = ""
    secret: bytes = b""
    admin_key_file: Path | None = None
    expect_nodes: int = 0
    grace_s: float = 30.0
    linger_s: float = 0.0
    key_cache_s: float = 5.0
    max_in_flight: int = 4096
    blob_grace_s: float = 6 * 3600.0
    log_level: str = "info"
    cast_plan: FixedPlan | None = None
    link_bytes_s: int | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    limits: RequestLimits = field(default_factory=RequestLimits)
    streams: StreamSettings = field(default_factory=StreamSettings)


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> GatewaySettings:
    """Settings from flags; exits with a message for an unknown or bad one."""
    parser = _parser()
    flags = parser.parse_args(argv)
    data: Path | None = flags.data_dir
    secret_file = flags.secret_file or (data and data / "cluster.secret")
    try:
        secret = load_or_create_secret(secret_file, environ)
    except (InvalidRecord, OSError) as error:
        parser.error(f"{error} (flag --secret-file)")
    return GatewaySettings(
        host=flags.host,
        port=flags.port,
        gateway_id=flags.gateway_id,
        redis_url=flags.redis_url,
        store=flags.store,
        secret=secret,
        admin_key_file=flags.admin_key_file or (data and data / "admin.key"),
        expect_nodes=flags.expect_nodes,
        grace_s=flags.grace,
        linger_s=flags.linger,
        max_in_flight=flags.max_in_flight,
        log_level=flags.log_level,
        cast_plan=flags.cast_planner,
        link_bytes_s=flags.usual_link_rate,
        deadlines=Deadlines(
            start_s=flags.start_timeout, idle_s=flags.idle_timeout, total_s=flags.total_timeout
        ),
        limits=RequestLimits(body_bytes=flags.max_body),
        streams=StreamSettings(write_timeout_s=flags.write_timeout),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hypercast gateway", description="The HTTP gateway of a Hypercast cluster.", allow_abbrev=False
    )
    size, duration, count = argument(parse_size), argument(parse_duration), number(0, 1 << 31)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=tcp_port, default=8080, help="port to listen on; 0 takes a free one")
    add("--gateway-id", default="", help="this gateway's name in the cluster; default: a fresh one")
    add("--redis-url", required=True, help="redis://host:port/db or unix:///path/redis.sock")
    add("--store", required=True, help="blob store: a folder or an fsspec URL")
    add("--data-dir", type=Path, help="where admin.key and cluster.secret are by default")
    add("--secret-file", type=Path, help="file with the cluster's secret (or HYPERCAST_CLUSTER_SECRET)")
    add("--admin-key-file", type=Path, help="where the first admin key is written, mode 0600")
    add("--expect-nodes", type=count, default=0, help="/readyz waits for so many nodes")
    add("--grace", type=duration, default=30.0, help="time for requests in flight on SIGTERM")
    add(
        "--linger",
        type=duration,
        default=0.0,
        help="time to answer 503 before leaving on SIGTERM",
    )
    add("--max-in-flight", type=count, default=4096, help="requests at once in this gateway")
    add("--max-body", type=size, default=32 << 20, help="largest request body")
    add(
        "--start-timeout",
        type=duration,
        default=300.0,
        help="until the first output, or progress of its start",
    )
    add("--idle-timeout", type=duration, default=60.0, help="between two outputs")
    add("--total-timeout", type=duration, default=1800.0, help="for a whole request")
    add("--write-timeout", type=duration, default=60.0, help="for a client that takes nothing of its answer")
    add(
        "--cast-planner",
        type=argument(parse_fixed_plan),
        metavar="NAME[/BLOCKS]",
        help="all casts by this planner, as in chain/512; for experiments",
    )
    add(
        "--usual-link-rate",
        type=argument(parse_rate),
        help="what nodes' links give, as 25gbit, until casts have measured them; default: 10gbit",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser
