"""vLLM's plug-in of Hypercast: `--load-format hypercast`.

- `attached`: an image that a node gives to this process, complete or arriving
- `loader`: the loader that vLLM calls
"""


def register() -> None:
    """Register the load format; vLLM calls this in each of its processes, possibly several times."""
    from hypercast_vllm.loader import register_loader

    register_loader()
