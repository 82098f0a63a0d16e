"""The run of one scenario in an engine, event by event."""
