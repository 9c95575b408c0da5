"""The settings of a process's traces, from its options."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from registry.config.options import Options
from registry.errors import InvalidRecord

_PATH = "/v1/traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings:
    """Where spans go (None: there are none), the share of requests that is traced, and the most a second."""

    url: str | None = None
    share: float = 1.0
    rate: int = 0


def tracing_settings(options: Options) -> TracingSettings:
    """Return the settings of a process with these options. Raises InvalidRecord."""
    endpoint = options.otlp_endpoint
    if endpoint is None:
        return TracingSettings()
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
    except ValueError:
        usable = False
    if not usable:
        raise InvalidRecord("--otlp-endpoint is no URL such as http://127.0.0.1:4318")
    if "@" in parts.netloc:
        raise InvalidRecord("--otlp-endpoint: pass credentials in OTEL_EXPORTER_OTLP_HEADERS, not in the URL")
    base = endpoint.rstrip("/")
    url = base if base.endswith(_PATH) else base + _PATH
    return TracingSettings(url=url, share=options.trace_sample, rate=options.trace_rate)
