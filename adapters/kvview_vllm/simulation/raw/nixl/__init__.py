"""Handoffs of a NIXL connector of vLLM between two simulated engines."""
