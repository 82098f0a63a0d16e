"""A standalone engine that keeps the kvview contract, without vLLM or a GPU."""
