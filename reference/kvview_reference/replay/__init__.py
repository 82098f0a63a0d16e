"""``kvview replay``: a request trace through the reference engine, with a connector.

:func:`kvview_reference.replay.run.replay` is what the command calls.
"""
