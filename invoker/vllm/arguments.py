"""The command line and the environment of a vLLM server. Pure."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from invoker.vllm.zygote import SERVER
from registry.config.devices import gpu_indices
from registry.config.engine_args import workers_of
from registry.images.adapters import FOLDER

CACHE = "cache"  # vLLM's, in the server's scratch folder
_GIB = 1 << 30
# The part of the node's environment that the server inherits: the places of libraries and devices.
_INHERITED = (
    *("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_HOME", "CUDA_VISIBLE_DEVICES"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "OMP_NUM_THREADS", "SSL_CERT_FILE"),
)
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has
_KV_SHARE = 4  # on a CPU the KV cache takes at most this part of the server's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSpec:
    """A vLLM server to start.

    `folder` has config.json, the tokenizer and the weights; `scratch` is the server's own folder, the only
    one that it writes to. `memory_bytes` bounds all of its processes together; `device` is `cpu`, `cuda:N`
    or, with several GPUs, `cuda:N,M`. `adapters` are ranks of LoRA adapters by name. With a `loader` the
    weights come from the node, by the plug-in with these settings.
    """

    python: Path
    folder: Path
    scratch: Path
    name: str
    dtype: str
    context_length: int
    max_sequences: int
    device: str
    memory_bytes: int
    arguments: Sequence[str] = ()
    loader: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, int] = field(default_factory=dict)

    @property
    def socket(self) -> Path:
        return self.scratch / "http.sock"


def server_command(spec: VllmSpec) -> list[str]:
    """Return the server's program with its arguments."""
    return [str(spec.python), "-m", SERVER, *server_arguments(spec)]


def server_arguments(spec: VllmSpec) -> list[str]:
    """Return the server's arguments; those of the function come last, so that they count."""
    given = {argument.partition("=")[0] for argument in spec.arguments}
    own = [
        *("--model", str(spec.folder)),
        *("--served-model-name", spec.name),
        *("--uds", str(spec.socket)),
        *("--max-num-seqs", str(spec.max_sequences)),
        "--disable-uvicorn-access-log",
    ]
    if spec.loader:
        own += ["--load-format", "hypercast", "--model-loader-extra-config", json.dumps(dict(spec.loader))]
    own += _adapter_arguments(spec, given)
    if spec.dtype and "--dtype" not in given:
        own += ["--dtype", spec.dtype]
    if spec.context_length and "--max-model-len" not in given:
        own += ["--max-model-len", str(spec.context_length)]
    if spec.device == "cpu" and "--enforce-eager" not in given:
        own.append("--enforce-eager")  # compiling takes up to a minute of each start there
    if _is_single(spec):
        own += ["--distributed-executor-backend", "uni"]
    return [*own, *spec.arguments]


def _is_single(spec: VllmSpec) -> bool:
    """Return whether the engine's process can run the model itself on a CPU.

    By default vLLM starts another process for that there, which imports all again, to bind threads to
    processors: it must not do that beside other instances.
    """
    return spec.device == "cpu" and workers_of(spec.arguments) == 1


def _adapter_arguments(spec: VllmSpec, given: Collection[str]) -> list[str]:
    if not spec.adapters:
        return []
    modules = [f"{spec.name}/{name}={spec.folder / FOLDER / name}" for name in spec.adapters]
    arguments = ["--enable-lora", "--lora-modules", *modules]
    if "--max-lora-rank" not in given:
        rank = max(spec.adapters.values())
        arguments += ["--max-lora-rank", str(next(one for one in _RANKS if one >= rank))]
    return arguments


def base_environment(scratch: Path, device: str, node: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of any process with vLLM, from the node's: no key, no secret, no hub."""
    visible = ",".join(_visible(index, node) for index in gpu_indices(device))
    return (
        {name: node[name] for name in _INHERITED if name in node}
        | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
        | {
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            "XDG_CACHE_HOME": str(scratch / CACHE),
            "VLLM_CACHE_ROOT": str(scratch / CACHE),
            "VLLM_RPC_BASE_PATH": str(scratch),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
    )


def _visible(index: int, node: Mapping[str, str]) -> str:
    """Return how the CUDA driver names the node's device of that index."""
    known = [name.strip() for name in node.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return known[index] if index < len(known) else str(index)


def server_environment(spec: VllmSpec, node: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment, from the node's."""
    environment = base_environment(spec.scratch, spec.device, node)
    if spec.device == "cpu":
        share = _KV_SHARE * workers_of(spec.arguments)
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, spec.memory_bytes // share // _GIB))
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if _is_single(spec):
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment
