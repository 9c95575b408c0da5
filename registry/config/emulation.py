"""The names of emulated models and accelerators, and which model runs on which device.

    emulated:llama2-13b/1000     a model; its image is real bytes, 1/1000 of the model's
    emulated:llama2-13b/1000@3   one of the same shape with other weights, and so another image
    emulated:h800x4/1000/10      a node of 4 GPUs with 1/1000 of the memory and rates, 10 times slower

The known names and their times are in invoker/emulated/profiles.py alone.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from registry.errors import InvalidRecord

EMULATED_PREFIX = "emulated:"
MAX_DIVISOR = 100_000

_MODEL = re.compile(r"emulated:([a-z0-9][a-z0-9.-]*)(?:/([1-9]\d{0,5}))?(?:@([1-9]\d{0,2}))?")
_DEVICE = re.compile(
    r"emulated:([a-z0-9][a-z0-9.-]*?)(?:x([1-9]\d?))?(?:/([1-9]\d{0,5})(?:/([1-9]\d{0,5}))?)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedModel:
    """A model with an image of 1/`scale` of its bytes, and without weights.

    Models that differ in `variant` alone have different images and the same step times.
    """

    name: str
    scale: int = 1
    variant: int = 0

    def __str__(self) -> str:
        scale = f"/{self.scale}" if self.scale > 1 else ""
        return f"{EMULATED_PREFIX}{self.name}{scale}" + (f"@{self.variant}" if self.variant else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """A node's emulated accelerator: `count` GPUs, bytes and rates divided by `scale`, times by `slower`."""

    name: str
    count: int = 1
    scale: int = 1
    slower: int = 1

    def __str__(self) -> str:
        divisors = (self.scale, self.slower)[: 2 if self.slower > 1 else int(self.scale > 1)]
        many = f"x{self.count}" if self.count > 1 else ""
        return f"{EMULATED_PREFIX}{self.name}{many}" + "".join(f"/{divisor}" for divisor in divisors)


def is_emulated(text: str) -> bool:
    """Return whether an architecture or a device is emulated, by its name."""
    return text.startswith(EMULATED_PREFIX)


def parse_model(text: str) -> EmulatedModel:
    """Parse the name of an emulated model. Raises InvalidRecord."""
    found = _MODEL.fullmatch(text)
    if found is None:
        raise InvalidRecord(
            f"{text!r} is not an emulated model: use emulated:MODEL or emulated:MODEL/SCALE, "
            "optionally followed by @VARIANT"
        )
    return EmulatedModel(name=found[1], scale=_divisor(text, found[2]), variant=int(found[3] or 0))


def parse_device(text: str) -> EmulatedDevice:
    """Parse the name of an emulated device. Raises InvalidRecord."""
    found = _DEVICE.fullmatch(text)
    if found is None:
        raise InvalidRecord(
            f"{text!r} is not an emulated device: use emulated:GPU, emulated:GPUxCOUNT, "
            "optionally followed by /SCALE or /SCALE/SLOWER"
        )
    return EmulatedDevice(
        name=found[1],
        count=int(found[2] or 1),
        scale=_divisor(text, found[3]),
        slower=_divisor(text, found[4]),
    )


@lru_cache(maxsize=1024)
def mismatch(architecture: str, device: str) -> str:
    """Return why a node with this device cannot run a model of this architecture, "" if it may."""
    if not is_emulated(device):
        return f"{architecture} runs on emulated devices only" if is_emulated(architecture) else ""
    if not is_emulated(architecture):
        return f"{device} runs emulated models only"
    try:
        wanted, given = parse_model(architecture).scale, parse_device(device).scale
    except InvalidRecord as error:  # unvalidated input
        return str(error)
    return "" if wanted == given else f"{architecture} is at 1/{wanted}, {device} at 1/{given}"


def _divisor(text: str, digits: str | None) -> int:
    number = int(digits or 1)
    if number > MAX_DIVISOR:
        raise InvalidRecord(f"{text!r}: a divisor is at most {MAX_DIVISOR}")
    return number
