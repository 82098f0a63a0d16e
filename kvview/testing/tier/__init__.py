"""The checks of the tier contract."""
