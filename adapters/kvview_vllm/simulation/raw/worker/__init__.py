"""The worker's side of a connector of vLLM: its role, the bytes of tokens, and several ranks."""
