"""The metrics that the adapter exports: of connectors, and of tiers."""
