"""Whether requests get exactly their own KV: by keys, and bit by bit in every memory layout.

:func:`~kvview_vllm.partition.matrix.check_partition` stores the KV of one request through the real
scheduler and the connector. Then it plays another request, in the same engine or in a second one on
the same store.
"""
