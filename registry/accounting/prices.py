"""The default price table, and the rate of a GPU type. Money is integer billionths of a dollar.

A rate never changes, because records name it: a new price is a new id, by convention `<type>-<number>` with a
greater number. Of the rates of one GPU type the greatest id is in force.
"""

from collections.abc import Iterable

from registry.errors import NotFound
from registry.records.usage import PriceRate
from registry.state import Ledger

CPU = "cpu"
ANY_GPU = "gpu"

# Billionths of a dollar a GPU-second: about 4.50 an hour for an h200, 0.18 for a CPU worker.
_GPU_SECOND_NANOS = {
    CPU: 50_000,
    ANY_GPU: 1_000_000,
    "t4": 160_000,
    "l4": 220_000,
    "a10": 300_000,
    "l40s": 550_000,
    "a100": 700_000,
    "h100": 1_100_000,
    "h200": 1_250_000,
    "b200": 1_750_000,
}

DEFAULT_RATES = tuple(
    PriceRate(
        id=f"{gpu_type}-001",
        gpu_type=gpu_type,
        gpu_second_nanos=gpu_second_nanos,
        request_nanos=200,
        prompt_mtoken_nanos=0,
        completion_mtoken_nanos=0,
    )
    for gpu_type, gpu_second_nanos in _GPU_SECOND_NANOS.items()
)


def rate_for(gpu_type: str, rates: Iterable[PriceRate]) -> PriceRate:
    """Return the rate in force for a device: by its exact type, a word of its name, or any GPU's.

    Names of drivers ("NVIDIA H100 80GB HBM3") are matched word by word. A CPU has no fallback. Raises
    NotFound.
    """
    latest: dict[str, PriceRate] = {}
    for rate in sorted(rates, key=lambda rate: rate.id):
        latest[rate.gpu_type.lower()] = rate
    name = gpu_type.lower()
    words = name.replace("-", " ").replace("_", " ").split()
    fallback = () if name == CPU else (ANY_GPU,)
    for candidate in (name, *words, *fallback):
        if candidate in latest:
            return latest[candidate]
    raise NotFound(f"the price table has no rate for {gpu_type!r}")


async def ensure_default_rates(ledger: Ledger) -> list[PriceRate]:
    """Add the default rates that the ledger lacks; return all rates."""
    known = {rate.id for rate in await ledger.rates()}
    for rate in DEFAULT_RATES:
        if rate.id not in known:
            await ledger.put_rate(rate)
    return await ledger.rates()
