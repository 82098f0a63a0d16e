"""The harnesses of both halves, which delay, lose and fail transfers."""
