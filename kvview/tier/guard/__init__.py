"""The guard of a tier: a checksum, private pages and a circuit breaker between engine and store."""
