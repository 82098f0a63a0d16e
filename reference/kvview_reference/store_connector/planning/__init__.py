"""The scheduler half of a :class:`StoreConnector`: requests, GPU blocks and places of pages."""
