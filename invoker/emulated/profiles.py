"""How long steps of a model take on an accelerator that is not there, derived from datasheets (pure).

A layer's time is the longest of computing (2 operations a weight and token, and attention's) and of reading
(its weights once a step, and the keys and values of the context), each at a part of the datasheet's rate,
plus a fixed time for its kernels. The parts are assumed, as the papers tell of no
step's time: 0.55 of peak in matrix products of prompts and 0.7 of the memory's rate, about what well-kept
engines reach on this generation. The embedding is a look-up and takes no time. Several GPUs of one node split
each layer (tensor parallelism) and add up each layer's output twice, at the rate and latency of their links.

Sizes are those of the published configurations in 16 bits; rates of links are those of the testbeds that
FaaScale and lambdaScale were measured on: 400 Gb/s between nodes, 64 GB/s from host memory, 5 GB/s from disk.
"""

from dataclasses import dataclass, replace

from registry.emulation import EmulatedDevice, EmulatedModel
from registry.errors import InvalidRecord
from registry.images.manifest import ALIGNMENT, LayerSpan

_BYTES = 2  # of a number in 16 bits


class UnknownProfile(InvalidRecord):
    """The message names those that there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU by its datasheet: dense 16-bit operations and bytes of memory a second; `compute` and `memory`
    are the parts of these that engines reach, `kernels_s` what the launches of a layer's kernels take.
    `peer_bytes_per_s` is what it exchanges with others of its node."""

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
class Decoder:
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
        """q and o, k and v, gate, up and down, and two norms."""
        kv = self.hidden // self.heads * self.kv_heads
        return 2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """All: the layers, embedding, head, and the norm before it."""
        return self.layers * self.layer_weights + 2 * self.embedding_weights + self.hidden

    @property
    def kv_layer_bytes(self) -> int:
        """The keys and values of one token in one layer."""
        return 2 * self.hidden // self.heads * self.kv_heads * _BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes a second: between nodes (each way), from host memory, and from the disk."""

    network: float = 50e9
    host: float = 64e9
    disk: float = 5e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step runs: `tokens` that are new, of `sequences`, and `context` tokens before these in all."""

    tokens: int
    sequences: int
    context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model on a node of `gpus` accelerators. `scale` divides all bytes that move between and into nodes,
    and the rates of links with them, so that transfers take the same time; computing stays as it is."""

    model: Decoder
    gpu: Accelerator
    gpus: int
    links: LinkRates
    scale: int = 1

    def __str__(self) -> str:
        scale = f", bytes and rates 1/{self.scale}" if self.scale > 1 else ""
        return f"emulated {self.gpus}x {self.gpu.name} with {self.model.name}{scale}"

    def layer_s(self, batch: Batch) -> float:
        """One layer of one step."""
        model, gpu, tokens = self.model, self.gpu, batch.tokens
        seen = _seen(batch)
        flops = 2 * model.layer_weights * tokens + 4 * model.hidden * seen
        read = model.layer_weights * _BYTES + (batch.context + tokens) * model.kv_layer_bytes
        return self._on_all(flops, read) + gpu.kernels_s + 2 * self._exchange_s(tokens)

    def head_s(self, sequences: int) -> float:
        """The norm and the head, for the last token of each sequence."""
        weights = self.model.embedding_weights
        return self._on_all(2 * weights * sequences, weights * _BYTES) + self.gpu.kernels_s

    def stage_s(self, first: int, last: int, batch: Batch) -> float:
        """A stage with the layers `[first, last)`; the one with the last layer runs the head too."""
        if not 0 <= first < last <= self.model.layers:
            raise ValueError(f"{self.model.name} has no layers [{first}, {last})")
        head_s = self.head_s(batch.sequences) if last == self.model.layers else 0.0
        return (last - first) * self.layer_s(batch) + head_s

    def step_s(self, batch: Batch) -> float:
        """The whole model."""
        return self.stage_s(0, self.model.layers, batch)

    def hidden_bytes(self, tokens: int) -> int:
        """What one stage hands to the next for these tokens."""
        return self._scaled(tokens * self.model.hidden * _BYTES)

    @property
    def kv_layer_bytes(self) -> int:
        """What is moved of one token's keys and values, for one layer."""
        return self._scaled(self.model.kv_layer_bytes)

    @property
    def free_tokens(self) -> int:
        """About how many tokens of prompts a step that decodes takes along while it reads the weights."""
        gpu = self.gpu
        computed_a_byte = gpu.flops_per_s * gpu.compute / (gpu.memory_bytes_per_s * gpu.memory)
        return max(1, int(computed_a_byte * _BYTES / 2))

    @property
    def kv_tokens(self) -> int:
        """How many tokens' keys and values fit beside the weights, a tenth of the memory left free."""
        free = 0.9 * self.gpus * self.gpu.memory_bytes - self.model.weights * _BYTES
        return int(free / (self.model.layers * self.model.kv_layer_bytes))

    @property
    def network_bytes_per_s(self) -> float:
        return self.links.network / self.scale

    @property
    def host_bytes_per_s(self) -> float:
        return self.links.host / self.scale

    @property
    def disk_bytes_per_s(self) -> float:
        return self.links.disk / self.scale

    @property
    def spans(self) -> tuple[LayerSpan, ...]:
        """The layers of the image that stands for the model: what a manifest says of one."""
        embedding = self.model.embedding_weights
        sizes = [embedding, *[self.model.layer_weights] * self.model.layers, embedding + self.model.hidden]
        kinds = [("embed", 0), *(("layer", index) for index in range(self.model.layers)), ("head", 0)]
        spans, start = [], 0
        for (kind, index), weights in zip(kinds, sizes, strict=True):
            end = start + self._aligned(weights * _BYTES)
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
        """All GPUs of the node do an equal part each."""
        gpu = self.gpu
        computing_s = flops / (self.gpus * gpu.flops_per_s * gpu.compute)
        return max(computing_s, read / (self.gpus * gpu.memory_bytes_per_s * gpu.memory))

    def _exchange_s(self, tokens: int) -> float:
        """The sum over all GPUs of one output, in a ring: each sends nearly twice all of it."""
        if self.gpus == 1:
            return 0.0
        nbytes = 2 * (self.gpus - 1) / self.gpus * tokens * self.model.hidden * _BYTES
        return nbytes / self.gpu.peer_bytes_per_s + self.gpu.exchange_s


def _seen(batch: Batch) -> float:
    """How many pairs of tokens attention looks at, its sequences being of like length."""
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
LLAMA_2_7B = Decoder(
    name="Llama-2 7B",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=32,
    intermediate=11008,
    vocabulary=32000,
)
LLAMA_2_13B = Decoder(
    name="Llama-2 13B",
    layers=40,
    hidden=5120,
    heads=40,
    kv_heads=40,
    intermediate=13824,
    vocabulary=32000,
)
LLAMA_2_70B = Decoder(
    name="Llama-2 70B",
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    intermediate=28672,
    vocabulary=32000,
)
MODELS = {"llama2-7b": LLAMA_2_7B, "llama2-13b": LLAMA_2_13B, "llama2-70b": LLAMA_2_70B}
# Nodes by what their models come from: host memory, or (as ServerlessLLM's cold start) the node's own disk.
DEVICES = {
    "h800": (H800, LinkRates()),
    "h800-disk": (H800, LinkRates(host=LinkRates().disk)),
}
# The 70B model needs 138 GB: the papers ran it on nodes of four GPUs, whose one port serves all of them.
PROFILES = {
    "h800-llama2-7b": Profile(model=LLAMA_2_7B, gpu=H800, gpus=1, links=LinkRates()),
    "h800-llama2-13b": Profile(model=LLAMA_2_13B, gpu=H800, gpus=1, links=LinkRates()),
    "h800-llama2-70b": Profile(model=LLAMA_2_70B, gpu=H800, gpus=4, links=LinkRates()),
}


def find_profile(name: str) -> Profile:
    """`NAME` or `NAME/SCALE`, as in `h800-llama2-13b/1000`. Raises UnknownProfile."""
    base, slash, scale = name.partition("/")
    known = PROFILES.get(base)
    divisor = int(scale) if scale.isascii() and scale.isdigit() else 0
    if known is None or (slash and divisor < 1):
        raise UnknownProfile(f"{name!r} is none of {', '.join(PROFILES)}, with /SCALE for smaller transfers")
    return replace(known, scale=divisor or 1)


def known_model(model: EmulatedModel) -> Decoder:
    """Raises UnknownProfile."""
    known = MODELS.get(model.name)
    if known is None:
        raise UnknownProfile(f"no emulated model {model.name!r}: there are {', '.join(MODELS)}")
    return known


def known_device(device: EmulatedDevice) -> tuple[Accelerator, LinkRates]:
    """Raises UnknownProfile."""
    known = DEVICES.get(device.name)
    if known is None:
        raise UnknownProfile(f"no emulated device {device.name!r}: there are {', '.join(DEVICES)}")
    return known


def profile_of(model: EmulatedModel, device: EmulatedDevice) -> Profile:
    """A model on a device. Raises UnknownProfile."""
    gpu, links = known_device(device)
    return Profile(model=known_model(model), gpu=gpu, gpus=device.count, links=links, scale=model.scale)
