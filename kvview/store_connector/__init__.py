"""A connector that is built from a store of pages by key, and does all the bookkeeping.

``connector`` has the base class, and ``scheduler`` and ``worker`` its halves. ``page_index`` tracks
the place of each page, and ``page_levels`` keeps the bytes. Authors may replace ``page_policy`` and
``transform``. The package needs pydantic and torch, so ``import kvview`` imports it on demand.
"""

from kvview.store_connector.connector import StoreConnector, StoreOptions
from kvview.store_connector.page_policy import Policy
from kvview.store_connector.transform import Transform

__all__ = ["Policy", "StoreConnector", "StoreOptions", "Transform"]
