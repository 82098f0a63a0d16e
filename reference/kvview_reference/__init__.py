"""A standalone engine that satisfies the kvview contract, without vLLM or a GPU."""
