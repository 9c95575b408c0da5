"""Certificates and keys: what the recipe makes without cert-manager is what cert-manager makes."""

import base64
import re
import subprocess
from pathlib import Path

import kubernetes_validate
import yaml

from registry.config.secrets import parse_key
from tests.fixtures.manifests import FOLDER, NAMESPACE, objects


def openssl(*arguments: object) -> str:
    return subprocess.run(
        ["openssl", *map(str, arguments)], capture_output=True, text=True, check=True
    ).stdout


def test_the_recipe_makes_what_cert_manager_makes(etc: Path) -> None:
    certificates = {c["spec"]["secretName"]: c["spec"] for c in objects("Certificate").values()}
    secrets = {
        secret["metadata"]["name"]: secret
        for secret in yaml.safe_load_all((etc / "made" / "secrets.yaml").read_text())
        if secret is not None
    }
    assert set(secrets) == set(certificates) - {"hypercast-ca"}
    for name, secret in secrets.items():
        kubernetes_validate.validate(secret, kubernetes_validate.latest_version(), strict=True)
        assert secret["metadata"]["namespace"] == NAMESPACE
        for key, file in (("tls.crt", f"{name}.crt"), ("tls.key", f"{name}.key"), ("ca.crt", "ca.crt")):
            assert base64.b64decode(secret["data"][key]) == (etc / "made" / file).read_bytes()
        verified = openssl("verify", "-CAfile", etc / "made" / "ca.crt", etc / "made" / f"{name}.crt")
        assert verified.endswith(": OK\n")
        shown = openssl(
            *("x509", "-noout", "-ext", "subjectAltName,extendedKeyUsage"),
            *("-in", etc / "made" / f"{name}.crt"),
        )
        wanted = certificates[name]
        assert re.findall(r"DNS:([\w.-]+)", shown) == wanted["dnsNames"]
        for usage, text in (("server auth", "TLS Web Server"), ("client auth", "TLS Web Client")):
            assert (usage in wanted["usages"]) == (text in shown)
    for service in ("redis", "hypercast-gateway"):
        assert f"{service}.{NAMESPACE}.svc" in objects("Certificate")[service]["spec"]["dnsNames"]


def test_the_admin_key_of_the_instructions_is_one() -> None:
    text = (FOLDER / "kustomization.yaml").read_text()
    assert "hc_$(openssl rand -hex 8)_$(openssl rand -hex 32)" in text
    assert parse_key(f"hc_{'0f' * 8}_{'0f' * 32}").id == "0f" * 8
