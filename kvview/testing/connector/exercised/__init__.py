"""The events and the code that runs have exercised."""
