"""Rows of FOCUS 1.2 (https://focus.finops.org): what a key used of a function on one UTC day, by meter. Pure.

The platform's operator is the provider, a tenant the billing account, an API key the sub account, a function
the resource, and an id of the price table with a meter the SKU price. Columns for what Hypercast does not
have (commitments, capacity reservations, regions, tags) are absent, but for those without which the published
validator cannot decide its other rules: `CommitmentDiscountStatus` and `PricingCurrency…`.

`PricingQuantity` is what is charged: each record is rounded up to a whole nano, and a failed request is free
of charge, so that it may differ from `ConsumedQuantity`. Its product with `ListUnitPrice` is the cost.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from registry.accounting.usage_chunks import day_text
from registry.accounting.usage_report import day_of
from registry.errors import InvalidRecord
from registry.exports.charges import Meter, charges_of, unit_price_nanos
from registry.exports.decimals import decimal_text, nanos_text, rounded_quotient
from registry.exports.moments import month_of, start_of_day
from registry.records.usage import PriceRate, RequestRecord

VERSION = "1.2"
PROVIDER = "Hypercast"
SERVICE = "Hypercast functions"
# Rows of one day, which are added up before they are written: some 50 MB.
MAX_ROWS = 100_000
QUANTITY_DIGITS = 18


class Kind(StrEnum):
    """The type of a column."""

    TEXT = "text"
    MOMENT = "moment"
    MONEY = "money"  # nine digits of a fraction
    QUANTITY = "quantity"  # QUANTITY_DIGITS of a fraction
    COUNT = "count"


COLUMNS: Mapping[str, Kind] = {
    "BilledCost": Kind.MONEY,
    "BillingAccountId": Kind.TEXT,
    "BillingAccountName": Kind.TEXT,
    "BillingCurrency": Kind.TEXT,
    "BillingPeriodEnd": Kind.MOMENT,
    "BillingPeriodStart": Kind.MOMENT,
    "ChargeCategory": Kind.TEXT,
    "ChargeClass": Kind.TEXT,
    "ChargeDescription": Kind.TEXT,
    "ChargeFrequency": Kind.TEXT,
    "ChargePeriodEnd": Kind.MOMENT,
    "ChargePeriodStart": Kind.MOMENT,
    "CommitmentDiscountStatus": Kind.TEXT,
    "ConsumedQuantity": Kind.QUANTITY,
    "ConsumedUnit": Kind.TEXT,
    "ContractedCost": Kind.MONEY,
    "ContractedUnitPrice": Kind.MONEY,
    "EffectiveCost": Kind.MONEY,
    "InvoiceId": Kind.TEXT,
    "InvoiceIssuerName": Kind.TEXT,
    "ListCost": Kind.MONEY,
    "ListUnitPrice": Kind.MONEY,
    "PricingCategory": Kind.TEXT,
    "PricingCurrency": Kind.TEXT,
    "PricingCurrencyContractedUnitPrice": Kind.MONEY,
    "PricingCurrencyEffectiveCost": Kind.MONEY,
    "PricingCurrencyListUnitPrice": Kind.MONEY,
    "PricingQuantity": Kind.QUANTITY,
    "PricingUnit": Kind.TEXT,
    "ProviderName": Kind.TEXT,
    "PublisherName": Kind.TEXT,
    "ResourceId": Kind.TEXT,
    "ResourceName": Kind.TEXT,
    "ResourceType": Kind.TEXT,
    "ServiceCategory": Kind.TEXT,
    "ServiceName": Kind.TEXT,
    "ServiceSubcategory": Kind.TEXT,
    "SkuId": Kind.TEXT,
    "SkuMeter": Kind.TEXT,
    "SkuPriceDetails": Kind.TEXT,
    "SkuPriceId": Kind.TEXT,
    "SubAccountId": Kind.TEXT,
    "SubAccountName": Kind.TEXT,
    "x_FunctionVersion": Kind.COUNT,
    "x_RequestCount": Kind.COUNT,
    "x_RowId": Kind.TEXT,
}
"""The columns by name, in the order of the alphabet, with their types; those with `x_` are our own."""

FocusRow = Mapping[str, str | None]
"""A row: each column's text, None where it has no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterUnits:
    """The units of a meter: what is counted (with that many digits of a fraction), and what has a price."""

    name: str
    consumed: str
    digits: int
    priced: str
    per_price: int  # counted in one priced unit


UNITS = {
    Meter.REQUESTS: MeterUnits(
        name="Requests", consumed="Requests", digits=0, priced="Requests", per_price=1
    ),
    Meter.PROMPT: MeterUnits(
        name="Prompt tokens", consumed="Tokens", digits=0, priced="1000000 Tokens", per_price=1_000_000
    ),
    Meter.COMPLETION: MeterUnits(
        name="Completion tokens", consumed="Tokens", digits=0, priced="1000000 Tokens", per_price=1_000_000
    ),
    Meter.GPU: MeterUnits(
        name="GPU time", consumed="GPU-Seconds", digits=3, priced="GPU-Seconds", per_price=1000
    ),
}


class Group(NamedTuple):
    """What the records of a row share, in the order of rows."""

    tenant: str
    key_id: str
    function: str
    version: int
    rate_id: str
    gpu_type: str
    meter: Meter


@dataclass(slots=True)
class _Sums:
    used: int = 0
    cost_nanos: int = 0
    requests: int = 0


@dataclass(slots=True)
class FocusRows:
    """Adds records up. Feed it each record once, in order of `ended_at`; a day's rows follow its last record.

    `rates` has the rates by id, `unpriced` is that of other records; `key_names` has the names of keys.
    """

    rates: Mapping[str, PriceRate]
    unpriced: PriceRate
    key_names: Mapping[str, str]
    provider: str = PROVIDER
    max_rows: int = MAX_ROWS
    _day: int | None = None
    _sums: dict[Group, _Sums] = field(default_factory=dict)

    def add(self, record: RequestRecord) -> Iterator[FocusRow]:
        """Add a record; yield the rows of the day before. Raises InvalidRecord for too many rows of a day."""
        day = day_of(record.ended_at)
        if day != self._day:
            yield from self.end()
            self._day = day
        rate = self.rates.get(record.rate_id, self.unpriced)
        for charge in charges_of(record, rate):
            group = Group(
                record.tenant,
                record.key_id,
                record.function,
                record.version,
                record.rate_id,
                record.gpu_type,
                charge.meter,
            )
            sums = self._sums.get(group)
            if sums is None:
                if len(self._sums) == self.max_rows:
                    raise InvalidRecord(
                        f"{day_text(day)} has over {self.max_rows} rows: export by tenant or by function"
                    )
                sums = self._sums[group] = _Sums()
            sums.used += charge.used
            sums.cost_nanos += charge.cost_nanos
            sums.requests += 1

    def end(self) -> Iterator[FocusRow]:
        """Yield the rows of the last day, in order of their groups."""
        day, sums = self._day, self._sums
        self._day, self._sums = None, {}
        if day is not None:
            for group in sorted(sums):
                yield self._row(day, group, sums[group])

    def _row(self, day: int, group: Group, sums: _Sums) -> FocusRow:
        rate = self.rates.get(group.rate_id, self.unpriced)
        units, month = UNITS[group.meter], month_of(day)
        price_nanos = unit_price_nanos(rate, group.meter)
        if price_nanos:
            quantity = rounded_quotient(sums.cost_nanos * 10**QUANTITY_DIGITS, price_nanos)
        elif sums.cost_nanos:  # of a rate that is not known any more
            price_nanos, quantity = sums.cost_nanos, 10**QUANTITY_DIGITS
        else:
            quantity = sums.used * 10**QUANTITY_DIGITS // units.per_price
        cost, price = nanos_text(sums.cost_nanos), nanos_text(price_nanos)
        name = self.key_names.get(group.key_id) or group.key_id
        return {
            "BilledCost": cost,
            "BillingAccountId": group.tenant,
            "BillingAccountName": group.tenant,
            "BillingCurrency": rate.currency,
            "BillingPeriodEnd": month[1],
            "BillingPeriodStart": month[0],
            "ChargeCategory": "Usage",
            "ChargeClass": None,
            "ChargeDescription": f"{units.name} of {group.function}:{group.version} on {group.gpu_type}",
            "ChargeFrequency": "Usage-Based",
            "ChargePeriodEnd": start_of_day(day + 1),
            "ChargePeriodStart": start_of_day(day),
            "CommitmentDiscountStatus": None,
            "ConsumedQuantity": decimal_text(sums.used, units.digits),
            "ConsumedUnit": units.consumed,
            "ContractedCost": cost,
            "ContractedUnitPrice": price,
            "EffectiveCost": cost,
            "InvoiceId": None,
            "InvoiceIssuerName": self.provider,
            "ListCost": cost,
            "ListUnitPrice": price,
            "PricingCategory": "Standard",
            "PricingCurrency": rate.currency,
            "PricingCurrencyContractedUnitPrice": price,
            "PricingCurrencyEffectiveCost": cost,
            "PricingCurrencyListUnitPrice": price,
            "PricingQuantity": decimal_text(quantity, QUANTITY_DIGITS),
            "PricingUnit": units.priced,
            "ProviderName": self.provider,
            "PublisherName": self.provider,
            "ResourceId": group.function,
            "ResourceName": None,
            "ResourceType": "Function",
            "ServiceCategory": "AI and Machine Learning",
            "ServiceName": SERVICE,
            "ServiceSubcategory": "AI Platforms",
            "SkuId": f"{rate.gpu_type or group.rate_id}/{group.meter.value}",
            "SkuMeter": units.name,
            "SkuPriceDetails": None,
            "SkuPriceId": f"{group.rate_id}/{group.meter.value}",
            "SubAccountId": group.key_id,
            "SubAccountName": " ".join(name.split()),
            "x_FunctionVersion": str(group.version),
            "x_RequestCount": str(sums.requests),
            "x_RowId": "/".join((day_text(day), *map(str, group))),
        }


def columns_of(row: FocusRow) -> Sequence[str]:
    """Return the row's values in the order of COLUMNS, "" for none."""
    return [row[name] or "" for name in COLUMNS]
