"""Emulated models for tests: images at a small scale, and devices whose time no machine can delay."""

from dataclasses import dataclass, field
from functools import cache

from invoker.emulated.device_clock import DeviceClock
from invoker.emulated.image import EmulatedPlan
from registry.emulation import EmulatedDevice, EmulatedModel
from registry.images.codec import encode_manifest
from registry.images.pack import hash_image
from tests.invoker_fixture import FakeImage

MODEL = EmulatedModel(name="llama2-7b", scale=10_000)
DEVICE = EmulatedDevice(name="h800", scale=10_000)


@cache
def emulated_image(model: EmulatedModel = MODEL) -> FakeImage:
    """The image with its manifest, as a deploy makes them."""
    plan = EmulatedPlan(model)
    manifest = hash_image(plan)
    return FakeImage(b"".join(bytes(view) for view in plan.chunks()), manifest, encode_manifest(manifest))


@dataclass
class ToldTime:
    """A time that goes by only while somebody sleeps."""

    now_s: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def clock(self, slower: int = 1) -> DeviceClock:
        return DeviceClock(slower, self.now, self.sleep)
