"""A connector that is built from a store of pages by key, and does all the bookkeeping.

``connector`` has the base class, ``scheduler`` and ``worker`` its halves. ``page_index`` tracks the
place of each page with one manager for each level, and ``named_pages`` keeps the bytes. Authors may
replace the ``transform``. Without a store, this is the offloading connector: a manager and a
transfer worker.
"""

from kvview_reference.store_connector.connector import (
    StoreConnector as StoreConnector,
    StoreOptions as StoreOptions,
)
from kvview_reference.store_connector.transform import Transform as Transform
