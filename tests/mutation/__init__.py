"""Automatic mutants: the reference and the shared code, each wrong in one place.

The share that the kit kills shows how far its verdict can be trusted:
``benchmarks/mutation.py`` runs many mutants, and writes docs/mutation.md.

1. Only the kit decides: its checks over each harness of the reference, and its runs of the
   reference's connectors and of the example. The project's own tests do not count.
2. Each mutant runs in a process of its own, forked from a process that has imported torch; only
   the copy that this process imports is wrong.
3. Names and sampling depend on a function's own source, so that the same seed draws nearly the
   same mutants after an edit elsewhere.

Other mutators do not fit. mutmut 3.8.1 takes its verdict from pytest alone and cannot sample by
seed. cosmic-ray 8.7.0 runs any command, but it starts a cold process for each mutant (1.5 s before
the first check) and writes into the sources. Of its 6,103 mutants of this code, 41 % exchange
arithmetic operators (550 in annotations, which are never evaluated), and it cannot remove a
statement, empty a return value, cut a slice or drop an ``else``.
"""
