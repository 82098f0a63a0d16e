"""Stores of the tier contract: files, and objects."""

from kvview_reference.tier.folder.file_store import FileStore
from kvview_reference.tier.folder.namespace_folder import NamespaceFolder
from kvview_reference.tier.folder.stored_entries import read_entry
from kvview_reference.tier.object_store import ObjectStore

__all__ = ["FileStore", "NamespaceFolder", "ObjectStore", "read_entry"]
