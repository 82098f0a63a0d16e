"""The checks of the event contract."""
