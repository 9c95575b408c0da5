"""A process that has imported vLLM and waits for a server to become: run by vLLM's interpreter, by path.

It imports nothing of ours. It prints READY, and reads one line: `{"arguments": [...], "environment": {...}}` of the
server. Engine processes are forked from it, so that they import nothing again.
"""

import json
import os
import runpy
import sys

READY = "hypercast: vLLM is imported"
_SERVER = "vllm.entrypoints.openai.api_server"
# What a server imports before it reads its arguments, as far as this release has it.
_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu_worker",
    "vllm.model_executor.models",
    "transformers",
)


def main() -> None:
    """Import vLLM, wait, and become the server."""
    import importlib

    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    print(READY, flush=True)
    line = sys.stdin.readline()
    if not line:
        return  # the node does not need it
    server = json.loads(line)
    os.environ.update(server["environment"])
    os.chdir(server["folder"])
    sys.argv = [_SERVER, *server["arguments"]]
    sys.modules.pop(_SERVER, None)
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
