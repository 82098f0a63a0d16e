"""The checks of the offloading contract."""
