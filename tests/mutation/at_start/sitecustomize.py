"""Imported at the start of Python, in processes that a check starts while a mutant runs."""

from tests.mutation.trial import begin_as_told

begin_as_told()
