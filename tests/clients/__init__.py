"""Tier stores under LMCache and SGLang."""

FAULTS = (
    *("put raises", "put blocks", "get raises", "lookup raises", "lookup blocks", "poll raises"),
    *("never reports", "reports twice", "too few flags", "lookup lies", "put lies"),
    *("flips a bit", "swaps keys", "is full"),
)
"""Modes of ``tests.tier.faulty_store.FaultyStore`` that a client can see."""
