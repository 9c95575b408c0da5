"""The TLS of a process's connections by its flags, with the same checks for all of them."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rdmacast.protocol.tls import NodeTls, TlsFiles, load_client, load_https, load_tls
from registry.config.options import Options
from registry.errors import InvalidRecord

T = TypeVar("T")

_TLS_SCHEME = "rediss://"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """The files by connection, None where it has no TLS (for Redis: none beyond what its URL says)."""

    http: TlsFiles | None = None
    channel: TlsFiles | None = None
    cast: TlsFiles | None = None
    redis: TlsFiles | None = None


def tls_settings(options: Options) -> TlsSettings:
    """Return the files that the flags name. Raises InvalidRecord if some but not all of a set are given."""
    return TlsSettings(
        http=_all_or_none(tls_cert=options.tls_cert, tls_key=options.tls_key),
        channel=_all_or_none(
            channel_tls_cert=options.channel_tls_cert,
            channel_tls_key=options.channel_tls_key,
            channel_tls_ca=options.channel_tls_ca,
        ),
        cast=_all_or_none(
            cast_tls_cert=options.cast_tls_cert,
            cast_tls_key=options.cast_tls_key,
            cast_tls_ca=options.cast_tls_ca,
        ),
        redis=_redis(options),
    )


def open_tls(files: TlsFiles | None, what: str) -> NodeTls:
    """Load mutual TLS for `what`; without files there is none. Raises InvalidRecord."""
    return NodeTls() if files is None else _loaded(load_tls, files, what)


def open_https(files: TlsFiles) -> ssl.SSLContext:
    """Load the certificate of the HTTP port. Raises InvalidRecord."""
    return _loaded(load_https, files, "the HTTP port")


def check_tls(settings: TlsSettings) -> None:
    """Load all files, to find what is wrong before anything starts. Raises InvalidRecord."""
    open_tls(settings.channel, "channels")
    open_tls(settings.cast, "casts")
    if settings.http is not None:
        open_https(settings.http)
    if settings.redis is not None:
        _loaded(load_client, settings.redis, "Redis")


def _loaded(load: Callable[[TlsFiles], T], files: TlsFiles, what: str) -> T:
    try:
        return load(files)
    except OSError as error:
        raise InvalidRecord(f"TLS for {what} by {files}: {error.strerror or error}") from error


def _redis(options: Options) -> TlsFiles | None:
    pair = _all_or_none(redis_cert=options.redis_cert, redis_key=options.redis_key)
    if pair is None and options.redis_ca is None:
        return None
    if not (options.redis_url or "").startswith(_TLS_SCHEME):
        raise InvalidRecord("--redis-ca and --redis-cert need a --redis-url with TLS: rediss://HOST:PORT/DB")
    return TlsFiles(ca=options.redis_ca, cert=options.redis_cert, key=options.redis_key)


def _all_or_none(**files: Path | None) -> TlsFiles | None:
    given = {name.rpartition("_")[2]: path for name, path in files.items() if path is not None}
    if not given:
        return None
    if len(given) < len(files):
        *first, last = ("--" + name.replace("_", "-") for name in files)
        raise InvalidRecord(f"{', '.join(first)} and {last} must be given together")
    return TlsFiles(**given)
