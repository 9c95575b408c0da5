"""Which engine runs a function's model."""

from enum import StrEnum

MAX_ENGINE_ARGS = 64
MAX_ARG_CHARS = 1024


class EngineKind(StrEnum):
    """The program that computes. An instance is one engine on one node."""

    NATIVE = "native"  # the node's own: it serves while the weights arrive
    VLLM = "vllm"  # vLLM's OpenAI server, a child process of the node
