"""The engine factory of a node with an emulated accelerator."""

import logging

from invoker.emulated.arrival import check_arrived
from invoker.emulated.device_clock import DeviceClock
from invoker.emulated.engine import EmulatedEngine
from invoker.emulated.kv import kv_shape
from invoker.emulated.profiles import Profile, UnknownProfile, find_device, profile_for
from invoker.emulated.stage import EmulatedStage
from invoker.engine.contract import (
    ComputeEngine,
    DeviceRegion,
    GenerateEngine,
    ModelSpec,
    OutOfKvCache,
    UnsupportedModel,
)
from invoker.engine.factory import max_sequences_for
from invoker.engine.kv.budget import TYPICAL_TOKENS
from invoker.engine.kv.cache import pages_for
from registry.config.emulation import EmulatedDevice, mismatch, parse_model

log = logging.getLogger(__name__)


class EmulatedEngineFactory:
    """The EngineFactory of emulated models; all engines of a node share its one device."""

    def __init__(self, device: EmulatedDevice, clock: DeviceClock | None = None) -> None:
        """Look the device's profile up. Raises UnknownProfile."""
        find_device(device)
        self.device = device
        self._clock = clock or DeviceClock(device.slower)

    def kv_bytes(self, spec: ModelSpec, max_concurrency: int) -> tuple[int, int]:
        """Return the minimum and the wanted size: see EngineFactory."""
        profile = self._profile(spec)
        first, last = self._layers(spec, profile)
        page_bytes = kv_shape(profile, last - first).page_bytes
        typical = min(spec.context_length, TYPICAL_TOKENS)
        minimum = pages_for(spec.context_length) * page_bytes
        return minimum, max(1, max_concurrency) * pages_for(typical) * page_bytes

    def make(
        self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None, max_concurrency: int
    ) -> GenerateEngine | ComputeEngine:
        """Return the engine of the spec's model: see EngineFactory."""
        profile = self._profile(spec)
        self._check(spec, region, profile)
        log.info("%s: %s, %d times slower than the device", region.device, profile, self.device.slower)
        return EmulatedEngine(
            profile,
            self._clock,
            _nbytes(kv),
            context_length=spec.context_length,
            max_sequences=max_sequences_for(max_concurrency),
        )

    def add_tokenizer(self, digest: str, content: bytes) -> None:
        """Do nothing: emulated text follows no grammar."""

    def check(self, spec: ModelSpec) -> None:
        """Raise UnsupportedModel unless the model can be emulated on this device."""
        self._check_spans(spec, self._profile(spec))

    def binds_early(self, spec: ModelSpec) -> bool:
        """Return False: the arrived bytes are checked when an engine is made."""
        return False

    def make_stage(self, spec: ModelSpec, region: DeviceRegion, kv: DeviceRegion | None) -> EmulatedStage:
        """Return the stage of the layers `spec.layers`; only their bytes must have arrived in the region."""
        profile = self._profile(spec)
        self._check(spec, region, profile)
        return EmulatedStage(profile, self._clock, _nbytes(kv), *self._layers(spec, profile))

    def _profile(self, spec: ModelSpec) -> Profile:
        architecture = spec.manifest.architecture
        if reason := mismatch(architecture, str(self.device)):
            raise UnsupportedModel(reason)
        try:
            return profile_for(parse_model(architecture), self.device)
        except UnknownProfile as error:
            raise UnsupportedModel(str(error)) from error

    def _check(self, spec: ModelSpec, region: DeviceRegion, profile: Profile) -> None:
        self._check_spans(spec, profile)
        assert region.buffer is not None
        base = 0 if spec.held is None else spec.held[0]
        check_arrived(spec.manifest, region.buffer, *self._layers(spec, profile), base)

    def _check_spans(self, spec: ModelSpec, profile: Profile) -> None:
        if spec.manifest.layers != profile.spans:
            raise UnsupportedModel(f"the image does not match {spec.manifest.architecture}")

    def _layers(self, spec: ModelSpec, profile: Profile) -> tuple[int, int]:
        return spec.layers or (0, profile.model.layers)


def _nbytes(kv: DeviceRegion | None) -> int:
    if kv is None:
        raise OutOfKvCache("no memory was reserved for keys and values")
    return kv.nbytes
