"""The differences between vLLM releases: versions, shapes, seams, probes, and calls."""
