"""Imported by Python when it starts, in processes that a check starts while a mutant is judged."""

from tests.mutation.trial import begin_as_told

begin_as_told()
