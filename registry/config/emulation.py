"""How emulated models and accelerators are spelled, and which go together.

    emulated:llama2-13b/1000     a model; its image is real bytes, 1/1000 of the model's
    emulated:h800x4/1000/10      a node of 4 GPUs whose memory and rates are 1/1000, and all 10 times slower

Which names there are, and their times, is known to invoker/emulated/profiles.py alone.
"""

import re
from dataclasses import dataclass

from registry.errors import InvalidRecord

EMULATED_PREFIX = "emulated:"
MOST_DIVISOR = 100_000

_MODEL = re.compile(r"emulated:([a-z0-9][a-z0-9.-]*)(?:/([1-9]\d{0,5}))?")
_DEVICE = re.compile(
    r"emulated:([a-z0-9][a-z0-9.-]*?)(?:x([1-9]\d?))?(?:/([1-9]\d{0,5})(?:/([1-9]\d{0,5}))?)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedModel:
    """A model of which only bytes are there: one in `scale` of them."""

    name: str
    scale: int = 1

    def __str__(self) -> str:
        return f"{EMULATED_PREFIX}{self.name}" + (f"/{self.scale}" if self.scale > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """A node's accelerator that is not there: `count` GPUs, bytes and rates divided by `scale`, all times
    `slower`."""

    name: str
    count: int = 1
    scale: int = 1
    slower: int = 1

    def __str__(self) -> str:
        divisors = (self.scale, self.slower)[: 2 if self.slower > 1 else int(self.scale > 1)]
        many = f"x{self.count}" if self.count > 1 else ""
        return f"{EMULATED_PREFIX}{self.name}{many}" + "".join(f"/{divisor}" for divisor in divisors)


def is_emulated(text: str) -> bool:
    """Whether an architecture or a device says that it is."""
    return text.startswith(EMULATED_PREFIX)


def parse_model(text: str) -> EmulatedModel:
    """Raises InvalidRecord."""
    found = _MODEL.fullmatch(text)
    if found is None:
        raise InvalidRecord(f"{text!r} is no emulated model: use emulated:MODEL or emulated:MODEL/SCALE")
    return EmulatedModel(name=found[1], scale=_divisor(text, found[2]))


def parse_device(text: str) -> EmulatedDevice:
    """Raises InvalidRecord."""
    found = _DEVICE.fullmatch(text)
    if found is None:
        raise InvalidRecord(
            f"{text!r} is no emulated device: use emulated:GPU, emulated:GPUxCOUNT, "
            "and behind it /SCALE or /SCALE/SLOWER"
        )
    return EmulatedDevice(
        name=found[1],
        count=int(found[2] or 1),
        scale=_divisor(text, found[3]),
        slower=_divisor(text, found[4]),
    )


def mismatch(architecture: str, device: str) -> str:
    """Why a node with this device cannot run a model of this architecture; "" if nothing is known that
    speaks against it."""
    if not is_emulated(device):
        return f"{architecture} runs on emulated devices only" if is_emulated(architecture) else ""
    if not is_emulated(architecture):
        return f"{device} runs emulated models only"
    try:
        wanted, given = parse_model(architecture).scale, parse_device(device).scale
    except InvalidRecord as error:  # it came from outside
        return str(error)
    return "" if wanted == given else f"{architecture} is at 1/{wanted}, {device} at 1/{given}"


def _divisor(text: str, digits: str | None) -> int:
    number = int(digits or 1)
    if number > MOST_DIVISOR:
        raise InvalidRecord(f"{text!r}: at most /{MOST_DIVISOR}")
    return number
