"""The guard under test."""
