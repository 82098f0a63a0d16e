"""The scenarios of seeds: the requests, faults and sizes of one run."""
