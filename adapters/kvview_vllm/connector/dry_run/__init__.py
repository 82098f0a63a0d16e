"""A trial run of the adapter: four requests, before a connector is bound."""
