"""``kvview size``: the hits and costs of host tiers of every size, from a request trace.

The command calls :func:`kvview_reference.sizing.sweep.size`.
"""
