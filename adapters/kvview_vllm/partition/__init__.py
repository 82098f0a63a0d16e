"""Checks that requests receive exactly their own KV: by keys, and in every memory layout.

:func:`~kvview_vllm.partition.matrix.check_partition` stores the KV of one request through the real
scheduler and the connector. Then it serves another request, in the same engine or in a second
engine with the same store.
"""
