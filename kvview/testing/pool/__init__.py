"""The pool contract under test."""
