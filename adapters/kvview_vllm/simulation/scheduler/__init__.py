"""A real scheduler of vLLM without a model: its configuration, requests, calls and outputs."""
