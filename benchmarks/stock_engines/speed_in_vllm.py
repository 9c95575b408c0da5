"""Tokens per second of vLLM: run by vLLM's interpreter, by path. It imports nothing of ours.

It reads `{"model", "dtype", "batch", "prompt", "tokens", "rounds", "compiled"}` on its standard input, and
prints `{"threads", "seconds"}`: the number of threads that torch computes with, and the seconds of each
round, after one that warms up. `compiled` is vLLM's own default, torch.compile: it needs a C++ compiler, and
up to a minute before the first round. Without it the model runs as it is written, as in a node's servers.
OMP_NUM_THREADS sets the threads.
"""

import contextlib
import json
import os
import sys
import time
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    """Measure one batch size."""
    request: dict[str, Any] = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        import torch
        from vllm import LLM, SamplingParams

        engine = LLM(
            model=request["model"],
            skip_tokenizer_init=True,
            dtype=request["dtype"],
            enforce_eager=not request["compiled"],
            max_model_len=2048,
            enable_prefix_caching=False,
            max_num_seqs=request["batch"],
        )
        sampling = SamplingParams(
            temperature=0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [
            {"prompt_token_ids": [(7 * i + 31 * row + 3) % 31_000 for i in range(request["prompt"])]}
            for row in range(request["batch"])
        ]
        rounds = []
        for _ in range(request["rounds"] + 1):
            began = time.perf_counter()
            engine.generate(prompts, sampling, use_tqdm=False)
            rounds.append(time.perf_counter() - began)
    print(json.dumps({"threads": torch.get_num_threads(), "seconds": rounds[1:]}), flush=True)


if __name__ == "__main__":
    main()
