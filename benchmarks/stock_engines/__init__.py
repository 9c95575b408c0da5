"""vLLM through Hypercast, beside vLLM alone and beside the native engine.

- `cast_start`: servers of vLLM that start while their model is cast to their nodes
- `command`: the experiments and their records
- `platform_start`: a start from zero on a platform
- `speed_in_vllm`: tokens per second of vLLM, run by its interpreter
- `vllm_server`: servers of vLLM without a platform
"""
