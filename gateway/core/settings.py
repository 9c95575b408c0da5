"""Settings of the gateway: flags, parsed once into frozen dataclasses."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.core.contract import Deadlines
from gateway.core.fixed_plan import FixedPlan, parse_fixed_plan
from rdmacast.protocol.handshake import Secret, secrets_of
from registry.config.command_line import parse_options, process_command
from registry.config.option_types import PlatformCommand
from registry.config.options import Options
from registry.config.rotation import cluster_secret
from registry.config.secrets import make_private, redis_password
from registry.config.tls import TlsSettings, tls_settings
from registry.errors import InvalidRecord
from registry.logs.lines import LogFormat
from registry.records.job import JobBounds
from registry.tracing.settings import TracingSettings, tracing_settings

HELP = """Run one gateway: the HTTP server of a Hypercast cluster.

\b
Example:
  hypercast gateway --redis-url redis://10.0.0.5:6379/0 --store /srv/hypercast/store \\
      --data-dir /srv/hypercast --host 10.0.0.5
"""
# Fields of Options and of GatewaySettings.
_SAME = (
    *("host", "port", "gateway_id", "expect_nodes", "grace_s", "linger_s", "log_level", "log_format"),
    *("max_in_flight", "max_connections", "body_memory_bytes", "redis_wait_replicas", "metrics_port"),
    *("served_copies_bytes", "vllm_metrics", "tenant_metrics"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonBounds:
    """Limits on a JSON body, so that decoding it never blocks the event loop for long."""

    containers: int  # arrays and objects
    strings: int  # keys among them
    commas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one request; "text" means bodies of completions, chat and embeddings."""

    body_bytes: int = 32 << 20
    text_bytes: int = 4 << 20
    text_json: JsonBounds = JsonBounds(containers=1 << 16, strings=1 << 17, commas=1 << 19)
    image_json: JsonBounds = JsonBounds(containers=200_000, strings=1 << 17, commas=1 << 20)
    handler_json: JsonBounds = JsonBounds(containers=1 << 20, strings=1 << 20, commas=1 << 23)
    first_byte_s: float = 10.0  # after which a connection that has sent nothing is closed
    body_idle_s: float = 30.0  # maximum pause between two pieces of a body
    body_total_s: float = 300.0  # maximum duration of a body, except uploads
    upload_bytes: int = 1 << 40
    json_depth: int = 64
    calls: int = 128  # prompts x choices of one request
    logprobs: int = 1 << 18  # choices x tokens x (1 + logprobs) of a response that is not streamed
    messages: int = 4096
    inputs: int = 2048  # texts of one embeddings request
    inline_chars: int = 2048  # texts up to this length are tokenised without a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How event streams behave while the call produces no output."""

    head_wait_s: float = 1.0  # maximum wait of the response head for an assigned instance
    stage_every_s: float = 0.25
    keepalive_s: float = 15.0
    key_check_s: float = 10.0  # between two looks whether the key of a watcher is still valid
    write_timeout_s: float = 60.0  # a client that reads nothing for this long is disconnected


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Jobs, files and batches: what one gateway runs at once, and bounds of the cluster.

    Of `jobs`, `job_bytes`, `files`, `file_bytes` and `batches` one tenant gets half. Results of jobs that run
    come on top, each of at most `result_bytes`.
    """

    at_once: int = 32
    lease_s: float = 10.0
    max_lost: int = 5  # attempts that do not return
    keep_s: float = 24 * 3600.0  # results
    expire_s: float = 24 * 3600.0  # what could not be run until then
    jobs: int = 20_000
    job_bytes: int = 256 << 20
    body_bytes: int = 4 << 20  # of one job
    result_bytes: int = 4 << 20
    files: int = 10_000
    file_bytes: int = 10 << 30
    upload_bytes: int = 200 << 20  # of one file
    files_keep_s: float = 30 * 86_400.0
    batches: int = 2_000
    batch_lines: int = 50_000
    hooks_at_once: int = 16
    hook_retries_s: tuple[float, ...] = (5, 30, 300, 1800, 7200, 18_000, 36_000)  # then it is given up
    hook_allow: tuple[str, ...] = ()  # hosts and networks to which webhooks may go although they are private

    @property
    def bounds(self) -> JobBounds:
        """The bounds of the queue."""
        return JobBounds(jobs=self.jobs, job_bytes=self.job_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """All settings of one gateway process."""

    host: str = "127.0.0.1"
    port: int = 8080
    metrics_host: str = ""
    metrics_port: int | None = None
    vllm_metrics: bool = False
    tenant_metrics: int = 0
    gateway_id: str = ""
    redis_url: str = ""
    store: str = ""
    redis_wait_replicas: int = 0
    secret: Secret = field(default=b"", repr=False)
    redis_password: str = field(default="", repr=False)
    tls: TlsSettings = field(default_factory=TlsSettings)
    admin_key_file: Path | None = None
    audit_file: Path | None = None
    expect_nodes: int = 0
    grace_s: float = 30.0
    linger_s: float = 0.0
    key_cache_s: float = 5.0
    max_in_flight: int = 4096
    max_connections: int = 8192
    body_memory_bytes: int = 512 << 20
    blob_grace_s: float = 6 * 3600.0
    log_level: str = "info"
    log_format: LogFormat = "text"
    tracing: TracingSettings = field(default_factory=TracingSettings)
    cast_plan: FixedPlan | None = None
    link_bytes_s: int | None = None
    served_copies_bytes: int = 0
    moves_on_drain: bool = True
    deadlines: Deadlines = field(default_factory=Deadlines)
    limits: RequestLimits = field(default_factory=RequestLimits)
    streams: StreamSettings = field(default_factory=StreamSettings)
    jobs: JobSettings = field(default_factory=JobSettings)

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """The cluster's secrets that are valid now, the newest first."""
        return secrets_of(self.secret)

    @property
    def scheme(self) -> str:
        """The scheme of its HTTP port."""
        return "http" if self.tls.http is None else "https"


COMMAND = process_command(PlatformCommand.GATEWAY, HELP)


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> GatewaySettings:
    """Parse flags into settings; exit with a message for an unknown or invalid one."""
    try:
        return make_settings(parse_options(COMMAND, argv), environ)
    except InvalidRecord as error:
        sys.stderr.write(f"hypercast gateway: {error}\n")
        raise SystemExit(2) from error


def make_settings(options: Options, environ: Mapping[str, str]) -> GatewaySettings:
    """Return the settings of a gateway with these options. Raises InvalidRecord."""
    data = options.data_dir
    if data is not None:
        make_private(data)
    secret_file = options.secret_file or (data and data / "cluster.secret")
    try:
        secret = cluster_secret(secret_file, environ)
    except (InvalidRecord, OSError) as error:
        raise InvalidRecord(f"{error} (flag --secret-file)") from error
    planner = options.cast_planner
    return GatewaySettings(
        **{name: getattr(options, name) for name in _SAME},
        metrics_host=options.metrics_host or options.host,
        redis_url=options.redis_url or "",
        redis_password=redis_password(options.redis_password_file, environ),
        store=options.store or "",
        secret=secret,
        tls=tls_settings(options),
        admin_key_file=options.admin_key_file or (data and data / "admin.key"),
        audit_file=data and data / "audit" / f"{options.gateway_id.replace('/', '_') or 'gateway'}.log",
        tracing=tracing_settings(options),
        cast_plan=None if planner is None else parse_fixed_plan(planner),
        link_bytes_s=options.usual_link_rate_bytes_s,
        moves_on_drain=options.drain_calls == "move",
        deadlines=Deadlines(
            start_s=options.start_timeout_s, idle_s=options.idle_timeout_s, total_s=options.total_timeout_s
        ),
        limits=RequestLimits(body_bytes=options.max_body_bytes),
        streams=StreamSettings(write_timeout_s=options.write_timeout_s),
        jobs=JobSettings(
            at_once=options.jobs_at_once,
            keep_s=options.jobs_keep_s,
            job_bytes=options.jobs_memory_bytes,
            file_bytes=options.files_size_bytes,
            files_keep_s=options.files_keep_s,
            hook_allow=tuple(filter(None, map(str.strip, options.webhook_allow.split(",")))),
        ),
    )
