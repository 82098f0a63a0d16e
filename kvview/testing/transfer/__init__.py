"""The transfer contract under test."""
