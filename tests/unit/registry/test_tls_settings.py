"""TLS by flags: complete sets, files read again after a change, HTTPS and its slow clients."""

import shutil
from pathlib import Path

import pytest

from rdmacast.protocol.tls import load_tls
from registry.channel.client import Channel, ChannelServer
from registry.config.options import Options
from registry.config.tls import tls_settings
from registry.errors import ChannelError, InvalidRecord
from tests.fixtures.tls import issue

SECRET = b"a secret of sixteen bytes"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (Options(tls_cert=Path("c")), "--tls-cert and --tls-key must be given together"),
        (Options(channel_tls_ca=Path("c")), "--channel-tls-cert, .* must be given together"),
        (Options(redis_ca=Path("c"), redis_url="redis://h"), "need a --redis-url with TLS"),
        (Options(redis_cert=Path("c"), redis_url="rediss://h"), "--redis-cert and --redis-key"),
    ],
)
def test_incomplete_files_are_named(options: Options, reason: str) -> None:
    with pytest.raises(InvalidRecord, match=reason):
        tls_settings(options)


async def test_a_channel_needs_a_certificate_at_both_ends_and_takes_a_new_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    used, other = issue(tmp_path / "a"), issue(tmp_path / "b")
    tls = load_tls(used)

    async def no_replies(_: object):  # type: ignore[no-untyped-def]
        return
        yield

    async with ChannelServer("tcp://127.0.0.1:0", SECRET, no_replies, tls=tls.server) as server:
        await (await Channel.connect(server.url, SECRET, tls=tls.client)).aclose()
        for wrong in (None, load_tls(other).client):
            with pytest.raises(ChannelError):
                await Channel.connect(server.url, SECRET, tls=wrong)
        for one, new in zip(used.paths, other.paths, strict=True):
            shutil.copy(new, one.with_suffix(".new"))
            one.with_suffix(".new").replace(one)
        await (await Channel.connect(server.url, SECRET, tls=load_tls(other).client)).aclose()
        await (await Channel.connect(server.url, SECRET, tls=tls.client)).aclose()
