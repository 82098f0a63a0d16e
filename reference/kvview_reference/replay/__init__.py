"""``kvview replay``: a request trace through the reference engine, with a connector.

The command calls :func:`kvview_reference.replay.run.replay`.
"""
