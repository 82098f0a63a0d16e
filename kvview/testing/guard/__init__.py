"""The checks of the guard."""
