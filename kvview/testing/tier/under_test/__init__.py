"""The store under test: its calls, its faults, and the files that it writes."""
