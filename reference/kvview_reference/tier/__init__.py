"""Stores of the tier contract: files, and objects."""

from kvview_reference.tier.folder.file_store import FileStore as FileStore
from kvview_reference.tier.folder.namespace_folder import NamespaceFolder as NamespaceFolder
from kvview_reference.tier.folder.stored_entries import read_entry as read_entry
from kvview_reference.tier.object_store import ObjectStore as ObjectStore
