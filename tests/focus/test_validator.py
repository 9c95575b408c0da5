"""Exports pass the FinOps Foundation's validator of FOCUS 1.2, which has an environment of its own."""

import os
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import pytest

from cli.exports import ExportTotals, write_csv, write_parquet
from registry.exports.exporter import ExportFormat
from registry.exports.focus import VERSION
from tests.fixtures.exports import exported, mixed_ledger

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("HYPERCAST_FOCUS_PYTHON", ROOT / ".venv-focus" / "bin" / "python"))
RUNNER = Path(__file__).with_name("validate.py")
# What of the specification's conditions a platform of Hypercast fulfils.
APPLICABLE = (
    "ACCOUNT_NAMING_SUPPORTED",
    "BILLING_BASED_ON_PROVISIONED_RESOURCES_SUPPORTED",
    "PUBLIC_PRICE_LIST_SUPPORTED",
    "RESOURCE_TYPE_ASSIGNMENT_SUPPORTED",
    "SUB_ACCOUNT_SUPPORTED",
    "UNIT_PRICING_SUPPORTED",
    "USAGE_MEASUREMENT_SUPPORTED",
)
# InvoiceId must be null without an invoice (C-004), and not null with one (C-005). The validator cannot
# see which is the case: it reports each row for one of the two, and of their parent, C-003, wants either.
EITHER = "InvoiceId-C-003-C", "InvoiceId-C-005-C"

Write = Callable[[Iterable[str], IO[bytes]], ExportTotals]

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="the FOCUS validator is not installed: `make install-focus`"
)


def results(file: Path, *options: str) -> dict[str, str]:
    """Return each rule's result: passed, failure or skipped."""
    report = file.with_suffix(".xml")
    command = [PYTHON, RUNNER, "--data-file", file, "--validate-version", VERSION, "--block-download"]
    command += ["--output-type", "unittest", "--output-destination", report, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {}
    for case in ET.parse(report).iter("testcase"):
        outcome = next(
            (child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed"
        )
        found[case.attrib["name"].partition(" ")[0]] = outcome
    return found


@pytest.mark.parametrize(("name", "write"), [("focus.csv", write_csv), ("focus.parquet", write_parquet)])
def test_exports_pass_the_validator(name: str, write: Write, tmp_path: Path) -> None:
    ledger = mixed_ledger(2000)
    lines = exported(ExportFormat.FOCUS, ledger, page=200).splitlines()
    file = tmp_path / name
    with file.open("wb") as out:
        totals = write(iter(lines), out)
    assert totals.cost_nanos == sum(record.cost_nanos for record in ledger)
    found = results(file, "--applicability-criteria", ",".join(APPLICABLE))
    assert [rule for rule, outcome in found.items() if outcome in ("failure", "error")] == [EITHER[1]]
    assert found[EITHER[0]] == "passed"
    assert sum(outcome == "passed" for outcome in found.values()) > 200


def test_the_validator_finds_what_is_wrong(tmp_path: Path) -> None:
    head, *rows = exported(ExportFormat.FOCUS, mixed_ledger(50)).splitlines()
    file = tmp_path / "wrong.csv"
    file.write_text("\n".join([head, *(row.replace(",Usage,", ",Consumption,") for row in rows)]))
    assert results(file)["ChargeCategory-C-003-M"] == "failure"
