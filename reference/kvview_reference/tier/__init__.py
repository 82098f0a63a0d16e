"""Stores of the tier contract: files."""

from kvview_reference.tier.file_store import FileStore, read_entry

__all__ = ["FileStore", "read_entry"]
