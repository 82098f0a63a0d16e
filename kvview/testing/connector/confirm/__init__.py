"""The repetition, shrinking and explanation of a failing run."""
