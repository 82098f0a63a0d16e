"""The geometry contract under test."""
