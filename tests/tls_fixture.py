"""Certificates of a cluster, made by openssl for the time of the tests."""

import subprocess
import tempfile
from functools import cache
from pathlib import Path

from rdmacast.tls import NodeTls, TlsFiles, load_tls


def issue(folder: Path, name: str = "node") -> TlsFiles:
    """A certificate for `name` of a new authority."""
    ca, ca_key = folder / f"{name}-ca.pem", folder / f"{name}-ca.key"
    cert, key, asked = folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}.csr"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl("req", "-x509", *curve, "-subj", "/CN=cluster", "-keyout", ca_key, "-out", ca)
    _openssl("req", *curve, "-subj", f"/CN={name}", "-keyout", key, "-out", asked)
    _openssl("x509", "-req", "-in", asked, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-out", cert)
    return TlsFiles(cert=cert, key=key, ca=ca)


@cache
def tls_of_nodes() -> NodeTls:
    with tempfile.TemporaryDirectory() as folder:
        return load_tls(issue(Path(folder)))


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
