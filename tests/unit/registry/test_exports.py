"""Laws of exports: sums are the ledger's, ids are stable, and rows add up as FOCUS wants."""

import csv
import io
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.errors import InvalidRecord
from registry.exports.charges import UNPRICED, Meter, charges_of
from registry.exports.decimals import decimal_text, nanos_of, nanos_text, rounded_quotient
from registry.exports.exporter import ExportFormat
from registry.exports.focus import COLUMNS, FocusRows
from registry.exports.lago import CODES, events_of
from registry.records.usage import RequestRecord, cost_parts
from tests.fixtures.exports import RATES, exported, records
from tests.fixtures.registry_records import request

NANO = Decimal(10) ** -9
ONE_DAY = 86_400.0


def focus(ledger: list[RequestRecord], *, page: int = 7) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(exported(ExportFormat.FOCUS, ledger, page=page))))


def events(form: ExportFormat, ledger: list[RequestRecord]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in exported(form, ledger).splitlines()]


@given(records())
def test_every_export_costs_what_the_ledger_does(ledger: list[RequestRecord]) -> None:
    nanos = sum(record.cost_nanos for record in ledger)
    rows = focus(ledger)
    for column in ("BilledCost", "ListCost", "ContractedCost", "EffectiveCost"):
        assert sum(nanos_of(row[column]) for row in rows) == nanos
    data = [event["data"] for event in events(ExportFormat.OPENMETER, ledger)]
    assert sum(Decimal(one["cost"]) for one in data) == nanos * NANO
    assert sum(one["cost_nanos"] for one in data) == nanos
    cents = [Decimal(one["precise_total_amount_cents"]) for one in events(ExportFormat.LAGO, ledger)]
    assert sum(cents) == nanos * NANO * 100


@given(records())
def test_every_export_has_all_use_of_each_meter(ledger: list[RequestRecord]) -> None:
    used = {
        Meter.REQUESTS: len(ledger),
        Meter.PROMPT: sum(record.prompt_tokens for record in ledger),
        Meter.COMPLETION: sum(record.completion_tokens for record in ledger),
        Meter.GPU: Decimal(sum(record.billed_gpu_ms for record in ledger)) / 1000,
    }
    rows, lago = focus(ledger), events(ExportFormat.LAGO, ledger)
    for meter, amount in used.items():
        of_meter = [row for row in rows if row["SkuId"].endswith(f"/{meter.value}")]
        assert sum(Decimal(row["ConsumedQuantity"]) for row in of_meter) == amount
        quantities = [one["properties"]["quantity"] for one in lago if one["code"] == CODES[meter]]
        assert sum(map(Decimal, quantities)) == amount
    of_requests = [row for row in rows if row["SkuMeter"] == "Requests"]
    assert sum(int(row["x_RequestCount"]) for row in of_requests) == len(ledger)


@given(records(), st.integers(1, 31))
def test_ids_are_unique_and_the_same_in_each_export(ledger: list[RequestRecord], page: int) -> None:
    rows = focus(ledger, page=page)
    assert rows == focus(ledger)
    # A month in one export is the days of it, each in one of its own.
    days = sorted({int(record.ended_at // ONE_DAY) for record in ledger})
    assert rows == [
        row for day in days for row in focus([one for one in ledger if one.ended_at // ONE_DAY == day])
    ]
    assert len({row["x_RowId"] for row in rows}) == len(rows)
    sent = events(ExportFormat.OPENMETER, ledger)
    assert [event["id"] for event in sent] == [record.request_id for record in ledger]
    ids = [event["transaction_id"] for event in events(ExportFormat.LAGO, ledger)]
    assert len(set(ids)) == len(ids)


@given(records())
def test_a_row_costs_its_quantity_times_its_price(ledger: list[RequestRecord]) -> None:
    for row in focus(ledger):
        assert list(row) == list(COLUMNS) == sorted(COLUMNS)
        cost = Decimal(row["ListUnitPrice"]) * Decimal(row["PricingQuantity"])
        assert abs(cost - Decimal(row["ListCost"])) < NANO / 2
        assert "e" not in (row["PricingQuantity"] + row["ConsumedQuantity"]).lower()
        assert row["ChargePeriodStart"] < row["ChargePeriodEnd"] <= row["BillingPeriodEnd"]
        assert row["BillingPeriodStart"] <= row["ChargePeriodStart"]
        assert len("".join(row.values()).splitlines()) == 1


@given(records())
def test_the_charges_of_a_record_are_its_cost(ledger: list[RequestRecord]) -> None:
    rates = {rate.id: rate for rate in RATES}
    for record in ledger:
        rate = rates.get(record.rate_id, UNPRICED)
        charges = charges_of(record, rate)
        assert sum(charge.cost_nanos for charge in charges) == record.cost_nanos
        assert min(charge.cost_nanos for charge in charges) >= 0
        assert len({charge.meter for charge in charges}) == len(charges)
        parts = cost_parts(rate, record.billed_gpu_ms, record.prompt_tokens, record.completion_tokens)
        if parts.total == record.cost_nanos:
            found = {charge.meter: charge.cost_nanos for charge in charges}
            assert found.get(Meter.GPU, 0) == parts.gpu
            assert found.get(Meter.REQUESTS, 0) == parts.request
            assert found.get(Meter.PROMPT, 0) == parts.prompt
            assert found.get(Meter.COMPLETION, 0) == parts.completion


def test_a_cost_without_a_known_price_is_not_lost() -> None:
    record = request(rate_id="gone-001", cost_nanos=123)
    (row,) = [row for row in focus([record]) if row["SkuMeter"] == "Requests"]
    assert (row["ListCost"], row["ListUnitPrice"], row["PricingQuantity"]) == (
        "0.000000123",
        "0.000000123",
        "1.0",
    )


def test_rows_of_one_day_are_bounded() -> None:
    rows = FocusRows(rates={}, unpriced=UNPRICED, key_names={}, max_rows=9)
    for key in ("k0", "k1", "k2"):  # each of three meters
        assert not list(rows.add(request(key, key_id=key, completion_tokens=0)))
    with pytest.raises(InvalidRecord, match="2023-11-14 has over 9 rows"):
        list(rows.add(request("r3", key_id="k3")))


def test_an_event_of_lago_is_in_the_smallest_unit_of_its_currency() -> None:
    def cents(currency: str) -> str:
        rate = replace(next(rate for rate in RATES if rate.id == "cpu-001"), currency=currency)
        found = events_of(request(cost_nanos=1_250_000_000), rate)
        total = sum(Decimal(event["precise_total_amount_cents"]) for event in found)
        return f"{total:f}".rstrip("0").rstrip(".") if "." in f"{total:f}" else f"{total:f}"

    assert [cents(currency) for currency in ("USD", "JPY", "KWD")] == ["125", "1.25", "1250"]


@given(st.integers(-(10**25), 10**25))
def test_amounts_keep_every_nano(nanos: int) -> None:
    assert Decimal(nanos_text(nanos)) == nanos * NANO
    assert Decimal(decimal_text(nanos, 9)) == nanos * NANO
    if nanos >= 0:
        assert nanos_of(nanos_text(nanos)) == nanos


def test_decimal_texts() -> None:
    assert decimal_text(1500, 3) == "1.5"
    assert (decimal_text(2000, 3), decimal_text(2000, 3, least=0)) == ("2.0", "2")
    assert (decimal_text(7, 0), decimal_text(7, 0, least=0)) == ("7.0", "7")
    assert decimal_text(-1, 2) == "-0.01"
    assert [rounded_quotient(amount, 4) for amount in (0, 1, 2, 5, 6)] == [0, 0, 1, 1, 2]
