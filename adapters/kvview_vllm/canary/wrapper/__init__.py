"""The wrapper around a connector: hooks, options, messages and metrics."""
