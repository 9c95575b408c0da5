"""Nodes that read from each other within TLS, on a whole platform."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.platform import Platform
from tests.fixtures.tls import issue


@pytest.fixture
def within_tls(tmp_path: Path) -> Iterator[Platform]:
    """Two nodes on two hosts, which know one authority."""
    files = issue(tmp_path)
    made = Platform(
        data=tmp_path / "data",
        flags=(
            *("--nodes", "2", "--hosts", "2"),
            *("--cast-tls-cert", str(files.cert), "--cast-tls-key", str(files.key)),
            *("--cast-tls-ca", str(files.ca)),
        ),
    )
    made.up()
    yield made
    made.down()


def test_an_image_goes_from_node_to_node_within_tls(within_tls: Platform, root: Path) -> None:
    name = "secret"
    within_tls.run("deploy", str(root / "functions" / "tiny-coder"), "--name", name)
    within_tls.run("scale", name, "--instances", "2")
    within_tls.until("both nodes run it", lambda: len(within_tls.instances(name)) == 2)
    within_tls.until("the bytes are counted", lambda: within_tls.counter("cast_recv_bytes_tcp") > 0)
