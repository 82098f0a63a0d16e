"""``kvview size``: what a host tier of every size would be worth, from a request trace.

:func:`kvview_reference.sizing.sweep.size` is what the command calls.
"""
