"""The models and invariants that decide whether a run broke a law."""
