"""The checks of the geometry contract."""
