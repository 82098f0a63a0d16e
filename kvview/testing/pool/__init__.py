"""The checks of the pool contract."""
