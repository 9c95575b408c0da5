"""Random decoders in memory: an image that engines bind to, and transformers' model over the same bytes."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from invoker.engine.contract import ModelSpec
from invoker.engine.factory import kv_bytes_needed
from invoker.engine.image_views import compute_dtype
from invoker.engine.paths import LayerPath
from invoker.engine.stage_engine import StageEngine
from registry.images.architectures import arrange
from registry.images.layout import lay_out
from registry.images.manifest import MANIFEST_FORMAT, Manifest
from registry.images.safetensors_file import SourceFile, SourceTensor

_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_NOWHERE = SourceFile(path=Path(), size=0, mtime_ns=0)


class TensorRegion:
    """A DeviceRegion backed by a torch tensor."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.nbytes = nbytes
        self.device = str(self.bytes.device)

    @property
    def pointer(self) -> int:
        return self.bytes.data_ptr()

    @property
    def buffer(self) -> memoryview | None:
        return self.bytes.numpy().data if self.bytes.device.type == "cpu" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """A model in two forms: the image in `region` that `spec` describes, and `reference` over its bytes."""

    spec: ModelSpec
    region: TensorRegion
    reference: PreTrainedModel

    def kv_bytes(self, sequences: int, layers: int | None = None) -> int:
        """Return the KV cache's bytes for that many full contexts, of `layers` layers or all."""
        spec, shape = self.spec, self.spec.manifest.architecture
        arguments = (shape, spec.config, spec.dtype, spec.context_length, max(1, sequences))
        return kv_bytes_needed(*arguments, layers=layers)

    def stage(self, layers: tuple[int, int], sequences: int, path: LayerPath) -> StageEngine:
        """Return an engine of the layers `[first, last)`."""
        kv = self.kv_bytes(sequences, layers[1] - layers[0])
        return StageEngine(replace(self.spec, layers=layers), self.region, kv, path=path)


def random_model(
    config: PreTrainedConfig, dtype: str, device: str, *, context: int, seed: int = 0, deviation: float = 0.02
) -> RandomModel:
    """Build a model of `config` on the device, with normal weights of standard deviation `deviation`."""
    with no_init_weights(), torch.device(device):
        reference = AutoModelForCausalLM.from_config(config, dtype=compute_dtype(dtype)).eval()
    reference.generation_config.eos_token_id = None  # exact lengths, like the engine with `ignore_eos`
    config = reference.config
    config.architectures = [type(reference).__name__]
    parameters = dict(reference.named_parameters())  # a tied head appears once
    raw = config.to_dict()
    arrangement = arrange(raw, parameters)
    layout = lay_out(arrangement.parts, {name: _source(name, p) for name, p in parameters.items()})
    region = TensorRegion(layout.nbytes, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    for entry in layout.tensors:
        flat = region.bytes[entry.offset : entry.offset + entry.nbytes]
        view = flat.view(compute_dtype(dtype)).view(entry.shape)
        if len(entry.shape) == 1 and entry.name.endswith("weight"):
            view.fill_(1.0)
        else:
            view.normal_(0.0, deviation, generator=generator)
        parameters[entry.name].data = view
    manifest = Manifest(
        format=MANIFEST_FORMAT,
        architecture=arrangement.architecture.name,
        model_type=arrangement.architecture.model_type,
        tied_head=arrangement.tied_head,
        num_layers=arrangement.num_layers,
        nbytes=layout.nbytes,
        sha256="",
        tensors=layout.tensors,
        layers=layout.layers,
        units=b"",
    )
    spec = ModelSpec(manifest=manifest, config=raw, dtype=dtype, context_length=context)
    return RandomModel(spec=spec, region=region, reference=reference)


def llama_125m() -> LlamaConfig:
    """Return a Llama of 124 million parameters: 12 layers of width 768, 32,000 tokens, a tied head."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2560,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


def llama_8b() -> LlamaConfig:
    """Return a Llama with the shape of Llama 3's 8B model."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )


def _source(name: str, parameter: torch.Tensor) -> SourceTensor:
    return SourceTensor(
        name=name,
        dtype=_STORED[parameter.dtype],
        shape=tuple(parameter.shape),
        file=_NOWHERE,
        offset=0,
        nbytes=parameter.numel() * parameter.element_size(),
    )
