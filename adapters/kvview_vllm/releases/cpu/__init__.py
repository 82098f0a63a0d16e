"""The worker's side of the installed vLLM on a CPU: caches, copies without CUDA, and ranks."""
