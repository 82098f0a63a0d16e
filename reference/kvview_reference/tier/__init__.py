"""Stores of the tier contract: files, and objects."""

from kvview_reference.tier.file_store import FileStore
from kvview_reference.tier.object_store import ObjectStore
from kvview_reference.tier.stored_entries import read_entry

__all__ = ["FileStore", "ObjectStore", "read_entry"]
