"""The loader of `--load-format hypercast`: weights from a node's host memory, in order of arrival.

`--model-loader-extra-config` takes `{"model": NAME}` or `{"image": SHA256}`, and if need be `"socket"` (the
path of the node's socket) and `"timeout_s"`.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from hypercast_vllm.attached import DEFAULT_TIMEOUT_S, AttachedImage, AttachError, Tensor, attach

FORMAT = "hypercast"
_DTYPES: dict[str, Any] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_KEYS = frozenset({"model", "image", "socket", "timeout_s"})

logger = init_logger("vllm.hypercast")


class HypercastLoader(BaseModelLoader):
    """Maps an image that a node has, or is receiving, and yields its tensors as they arrive."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: the node brings the image."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Load all weights. Raises AttachError."""
        extra = dict(self.load_config.model_loader_extra_config or {})
        started_s = time.perf_counter()
        with attach(
            _request(extra), extra.get("socket"), float(extra.get("timeout_s", DEFAULT_TIMEOUT_S))
        ) as image:
            loaded = model.load_weights(weights(image))  # type: ignore[operator]  # all of vLLM's models have it
        seconds = time.perf_counter() - started_s
        count = "all" if loaded is None else len(loaded)
        logger.info("Hypercast: %s parameters, %d bytes, %.3f s", count, image.nbytes, seconds)


def _request(extra: dict[str, Any]) -> dict[str, str]:
    """Return what is asked of the node. Raises AttachError."""
    if unknown := sorted(set(extra) - _KEYS):
        raise AttachError(
            f"--model-loader-extra-config: unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}"
        )
    given: dict[str, str] = {key: str(extra[key]) for key in ("model", "image") if key in extra}
    if len(given) != 1:
        raise AttachError('--model-loader-extra-config: give {"model": NAME} or {"image": SHA256}')
    return given


def weights(image: AttachedImage) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an image by name, each once it has arrived, as views of shared memory."""
    for tensor in image.tensors():
        yield tensor.name, view(image, tensor)


def view(image: AttachedImage, tensor: Tensor) -> torch.Tensor:
    """Return a tensor as a view of the image, copied where it is not aligned. Raises AttachError."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise AttachError(f"tensor {tensor.name!r} has the dtype {tensor.dtype}, which torch does not have")
    if tensor.start == tensor.end:
        return torch.empty(tensor.shape, dtype=dtype)
    nbytes = tensor.end - tensor.start
    flat = torch.frombuffer(image.memory, dtype=torch.uint8, count=nbytes, offset=tensor.start)
    if tensor.start % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(tensor.shape)


def register_loader() -> None:
    """Register the load format, once a process."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as known

    if FORMAT not in known:
        register_model_loader(FORMAT)(HypercastLoader)
