"""The sampled blocks: which blocks, their digests, and the comparison."""
