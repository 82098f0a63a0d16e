"""Real clients of the block pool, ported to the view."""
