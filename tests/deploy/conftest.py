"""What the tests of the manifests share."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.manifests import KUBERNETES


@pytest.fixture(scope="session")
def etc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like /etc/hypercast, with what certificates.sh makes in `made`."""
    folder = tmp_path_factory.mktemp("etc")
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    made = subprocess.run(
        ["sh", KUBERNETES / "certificates.sh", folder / "made"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    (folder / "tls").mkdir()
    for name in ("cluster.secret", "redis.password", "admin.key"):
        (folder / name).write_text("0" * 64)
    shutil.copy(folder / "made" / "ca.crt", folder / "tls" / "ca.crt")
    for name, secret in (("http", "hypercast-gateway-tls"), ("node", "hypercast-node-tls")):
        for kind in ("crt", "key"):
            shutil.copy(folder / "made" / f"{secret}.{kind}", folder / "tls" / f"{name}.{kind}")
    return folder
