"""Whether a connector shares KV exactly between the requests for which the model computes the same.

:func:`~kvview_vllm.partition.matrix.check_partition` stores the KV of one request through the real
scheduler and the connector, and then asks for another request that differs in one property, in the
same engine or in a second one on the same store.
"""
