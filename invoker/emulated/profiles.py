"""Step times of a model on an emulated accelerator, derived from datasheets (pure).

A layer's time is the maximum of computing (2 operations a weight and token, and attention's) and of reading
(its weights once a step, and the keys and values of the context), each at a fraction of the datasheet's rate,
plus a fixed time for its kernels. The fractions are assumed, as the papers report no step times: 0.55 of peak
in matrix products of prompts and 0.7 of the memory's rate, about what well-tuned engines reach on this
generation. The embedding is a look-up and takes no time. Several GPUs of one node split each layer (tensor
parallelism) and all-reduce each layer's output twice, at the rate and latency of their links.

Sizes are those of the published configurations in 16 bits; link rates are those of the papers' testbeds:
H800 of FaaScale and lambdaScale (400 Gb/s between nodes, 64 GB/s from host memory, 5 GB/s from disk), A800
of BlitzScale (Table 1, cluster A: 100 Gb/s between nodes, 128 Gb/s from host memory, 10 Gb/s from disk).
"""

from dataclasses import dataclass

from registry.config.emulation import EmulatedDevice, EmulatedModel
from registry.errors import InvalidRecord
from registry.images.manifest import ALIGNMENT, LayerSpan

BYTES = 2  # of a number in 16 bits
HEADER_BYTES = 16 << 10  # of an image, whatever its scale: less than a unit, which would slow casts


class UnknownProfile(InvalidRecord):
    """No such model or device; the message names the known ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU by its datasheet: dense 16-bit operations and memory bytes a second.

    `compute` and `memory` are the fractions of these that engines reach, `kernels_s` is the time to launch a
    layer's kernels. `peer_bytes_per_s` is its rate to other GPUs of its node.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    peer_bytes_per_s: float
    compute: float = 0.55
    memory: float = 0.7
    kernels_s: float = 20e-6
    exchange_s: float = 10e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A Llama-type model by its config.json; the head is not tied."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int = 4096

    @property
    def layer_weights(self) -> int:
        """The weights of q and o, k and v, gate, up and down, and two norms."""
        kv = self.hidden // self.heads * self.kv_heads
        return 2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """All weights: the layers, embedding, head, and the norm before it."""
        return self.layers * self.layer_weights + 2 * self.embedding_weights + self.hidden

    @property
    def kv_layer_bytes(self) -> int:
        """The bytes of one token's K and V in one layer."""
        return 2 * self.hidden // self.heads * self.kv_heads * BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes a second: between nodes (each way), from host memory, and from the disk."""

    network: float = 50e9
    host: float = 64e9
    disk: float = 5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """The work of a step: `tokens` new tokens of `sequences`, after `context` earlier tokens in total."""

    tokens: int
    sequences: int
    context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model on a node of `gpus` accelerators.

    `scale` divides all bytes that move between and into nodes, and the rates of links with them, so that
    transfers take the same time; computing is not scaled.
    """

    model: DecoderShape
    gpu: Accelerator
    gpus: int
    links: LinkRates
    scale: int = 1

    def __str__(self) -> str:
        scale = f", bytes and rates 1/{self.scale}" if self.scale > 1 else ""
        return f"emulated {self.gpus}x {self.gpu.name} with {self.model.name}{scale}"

    def layer_s(self, batch: StepLoad) -> float:
        """Return the seconds of one layer in one step."""
        model, gpu, tokens = self.model, self.gpu, batch.tokens
        seen = _seen(batch)
        flops = 2 * model.layer_weights * tokens + 4 * model.hidden * seen
        read = model.layer_weights * BYTES + (batch.context + tokens) * model.kv_layer_bytes
        return self._on_all(flops, read) + gpu.kernels_s + 2 * self._exchange_s(tokens)

    def head_s(self, sequences: int) -> float:
        """Return the seconds of the norm and the head, for the last token of each sequence."""
        weights = self.model.embedding_weights
        return self._on_all(2 * weights * sequences, weights * BYTES) + self.gpu.kernels_s

    def stage_s(self, first: int, last: int, batch: StepLoad, sampled: int | None = None) -> float:
        """Return the seconds of the layers `[first, last)`; the last layer's stage runs the head too.

        The head runs for `sampled` sequences (None: all).
        """
        if not 0 <= first < last <= self.model.layers:
            raise ValueError(f"{self.model.name} has no layers [{first}, {last})")
        rows = (batch.sequences if sampled is None else sampled) if last == self.model.layers else 0
        return (last - first) * self.layer_s(batch) + (self.head_s(rows) if rows else 0.0)

    def step_s(self, batch: StepLoad) -> float:
        """Return the seconds of the whole model."""
        return self.stage_s(0, self.model.layers, batch)

    def hidden_bytes(self, tokens: int) -> int:
        """Return the bytes that one stage sends to the next for `tokens` tokens."""
        return self._scaled(tokens * self.model.hidden * BYTES)

    @property
    def kv_layer_bytes(self) -> int:
        """The bytes that move for one token's K and V in one layer."""
        return self._scaled(self.model.kv_layer_bytes)

    @property
    def free_tokens(self) -> int:
        """About the number of prompt tokens that a decode step computes while it reads the weights."""
        gpu = self.gpu
        computed_a_byte = gpu.flops_per_s * gpu.compute / (gpu.memory_bytes_per_s * gpu.memory)
        return max(1, int(computed_a_byte * BYTES / 2))

    @property
    def spans(self) -> tuple[LayerSpan, ...]:
        """The layer spans of the emulated image, as in a manifest: the first has the header too."""
        embedding = self.model.embedding_weights
        sizes = [embedding, *[self.model.layer_weights] * self.model.layers, embedding + self.model.hidden]
        kinds = [("embed", 0), *(("layer", index) for index in range(self.model.layers)), ("head", 0)]
        spans, start = [], 0
        for (kind, index), weights in zip(kinds, sizes, strict=True):
            end = start + self._aligned(weights * BYTES) + (0 if start else HEADER_BYTES)
            spans.append(LayerSpan(kind=kind, index=index, tower="", start=start, end=end))
            start = end
        return tuple(spans)

    @property
    def image_bytes(self) -> int:
        return self.spans[-1].end

    def _aligned(self, nbytes: int) -> int:
        return -(-self._scaled(nbytes) // ALIGNMENT) * ALIGNMENT

    def _scaled(self, nbytes: int) -> int:
        return -(-nbytes // self.scale)

    def _on_all(self, flops: float, read: float) -> float:
        """Return the seconds of work that all GPUs of the node share equally."""
        gpu = self.gpu
        computing_s = flops / (self.gpus * gpu.flops_per_s * gpu.compute)
        return max(computing_s, read / (self.gpus * gpu.memory_bytes_per_s * gpu.memory))

    def _exchange_s(self, tokens: int) -> float:
        """Return the seconds of a ring all-reduce of one output: each GPU sends nearly twice its size."""
        if self.gpus == 1:
            return 0.0
        nbytes = 2 * (self.gpus - 1) / self.gpus * tokens * self.model.hidden * BYTES
        return nbytes / self.gpu.peer_bytes_per_s + self.gpu.exchange_s


def _seen(batch: StepLoad) -> float:
    """Return the number of token pairs in attention, for sequences of equal length."""
    own = batch.tokens / batch.sequences
    return batch.tokens * (batch.context / batch.sequences + (own + 1) / 2)


# NVIDIA's datasheet: the H800 SXM computes as the H100 does; its NVLink gives 400 GB/s, half of it each way.
H800 = Accelerator(
    name="H800",
    flops_per_s=989.4e12,
    memory_bytes_per_s=3.35e12,
    memory_bytes=80 * 10**9,
    peer_bytes_per_s=200e9,
)
# The A800 SXM is an A100 whose NVLink gives 400 GB/s, half of it each way.
A800 = Accelerator(
    name="A800",
    flops_per_s=312e12,
    memory_bytes_per_s=2.039e12,
    memory_bytes=80 * 10**9,
    peer_bytes_per_s=200e9,
)
LLAMA_2_7B = DecoderShape(
    name="Llama-2 7B",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=32,
    intermediate=11008,
    vocabulary=32000,
)
LLAMA_2_13B = DecoderShape(
    name="Llama-2 13B",
    layers=40,
    hidden=5120,
    heads=40,
    kv_heads=40,
    intermediate=13824,
    vocabulary=32000,
)
LLAMA_2_70B = DecoderShape(
    name="Llama-2 70B",
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    intermediate=28672,
    vocabulary=32000,
)
MODELS = {"llama2-7b": LLAMA_2_7B, "llama2-13b": LLAMA_2_13B, "llama2-70b": LLAMA_2_70B}
A800_LINKS = LinkRates(network=12.5e9, host=16e9, disk=1.25e9)
# Nodes by the source of their models: host memory, or (as in ServerlessLLM's cold start) the node's own disk.
DEVICES = {
    "h800": (H800, LinkRates()),
    "h800-disk": (H800, LinkRates(host=LinkRates().disk)),
    "a800": (A800, A800_LINKS),
}


def find_model(model: EmulatedModel) -> DecoderShape:
    """Return the shape of an emulated model. Raises UnknownProfile."""
    known = MODELS.get(model.name)
    if known is None:
        raise UnknownProfile(f"no emulated model {model.name!r}: use {', '.join(MODELS)}")
    return known


def find_device(device: EmulatedDevice) -> tuple[Accelerator, LinkRates]:
    """Return an emulated device and its link rates. Raises UnknownProfile."""
    known = DEVICES.get(device.name)
    if known is None:
        raise UnknownProfile(f"no emulated device {device.name!r}: use {', '.join(DEVICES)}")
    return known


def profile_for(model: EmulatedModel, device: EmulatedDevice) -> Profile:
    """Return the profile of a model on a device. Raises UnknownProfile."""
    gpu, links = find_device(device)
    return Profile(model=find_model(model), gpu=gpu, gpus=device.count, links=links, scale=model.scale)
