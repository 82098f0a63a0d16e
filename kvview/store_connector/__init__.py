"""A connector from a store of pages by key: the bookkeeping is done here.

``connector`` is the base class, ``scheduler`` and ``worker`` are its halves, ``levels`` the index
of a level and ``page_levels`` its bytes. ``page_policy`` and ``transform`` are what an author may
replace. Importing it needs pydantic and torch, so ``import kvview`` does so only on demand.
"""

from kvview.store_connector.connector import StoreConnector, StoreOptions
from kvview.store_connector.page_policy import Policy
from kvview.store_connector.transform import Transform

__all__ = ["Policy", "StoreConnector", "StoreOptions", "Transform"]
