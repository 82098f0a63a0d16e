"""The base of the suites from which implementers derive one class for each contract."""
