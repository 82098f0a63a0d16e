"""Base classes for authors of stores: blocking methods, coroutines, or polled jobs."""
