"""Connectors of kvview under the simulated engine: the bytes, the events, and the harness."""
