"""The offloading contract under test."""
