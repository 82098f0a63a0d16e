"""Clients of the block pool as they are in the world, ported to the view."""
