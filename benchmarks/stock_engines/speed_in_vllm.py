"""Tokens per second of vLLM: run by vLLM's interpreter, by path. It imports nothing of ours.

It reads `{"model", "dtype", "batch", "prompt", "tokens", "rounds"}` on its standard input, and prints
`{"seconds"}` for each round, after one that warms up.
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
        from vllm import LLM, SamplingParams

        engine = LLM(
            model=request["model"],
            skip_tokenizer_init=True,
            dtype=request["dtype"],
            enforce_eager=True,
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
    for seconds in rounds[1:]:
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
