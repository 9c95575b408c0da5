"""Tests of the engine vLLM with real servers: `make test-vllm`."""
