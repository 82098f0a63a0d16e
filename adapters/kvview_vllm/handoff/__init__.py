"""Handoffs between two real engines of the installed vLLM, with a connector of vLLM."""
