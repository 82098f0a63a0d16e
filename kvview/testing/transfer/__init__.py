"""The checks of the transfer contract."""
