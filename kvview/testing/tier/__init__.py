"""The tier contract under test."""
