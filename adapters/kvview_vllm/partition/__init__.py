"""Checks that each request receives exactly its own KV, for all keys and all memory layouts.

:func:`~kvview_vllm.partition.matrix.check_partition` stores the KV of one request through the real
scheduler and the connector. It then serves another request, in the same engine or in a second
engine with the same store.
"""
