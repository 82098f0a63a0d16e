"""A connector in a package of its own: KV blocks on a shelf, found by their keys."""

from kv_shelf.connector import ShelfConnector

__all__ = ["ShelfConnector"]
