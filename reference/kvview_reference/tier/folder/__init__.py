"""A store of files: one folder for each namespace, shared by threads and processes."""
