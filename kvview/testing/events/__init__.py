"""The event contract under test."""
