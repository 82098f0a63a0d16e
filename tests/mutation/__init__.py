"""Automatic mutants: the reference and the shared code, each wrong in one place.

The share that the kit kills shows how far its verdict can be trusted: ``kvview check --self-test``
runs a few mutants, ``benchmarks/mutation.py`` many, and writes docs/mutation.md.

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

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from . import operators, survivors, trial

SEEDS = 20  # of each connector


def summarize(num: int, seed: int, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run some mutants, and return the figures for a report.

    A mutant with a reason in ``survivors.toml`` counts as alive and does not run.
    """
    trial.warm_up()
    num_processes = min(2, os.cpu_count() or 1)
    sites = trial.all_sites()
    entries = survivors.of_modules(survivors.read_survivors(), trial.MODULES)
    chosen = operators.sample(sites, num, seed)
    verdicts = survivors.believed(chosen, entries, {})
    is_known = {verdict.site.id for verdict in verdicts}
    verdicts += trial.play(
        [site for site in chosen if site.id not in is_known],
        trial.measure_reach(num_seeds=SEEDS, num_processes=num_processes),
        num_processes=num_processes,
        num_seeds=SEEDS,
        on_verdict=lambda verdict: on_progress(verdict.site.id),
    )
    account = survivors.compare(verdicts, sites, entries)
    rows = [
        {"id": one.site.id, "change": one.site.change, "how": one.how, "killed_by": one.killed_by}
        for one in verdicts
    ]
    return {
        "seed": seed,
        "num_seeds": SEEDS,
        "num_possible": len(sites),
        "mutants": rows,
        "num_killed": sum(verdict.is_killed for verdict in verdicts),
        "unexplained": [one.site.id for one in account.unexplained],
        "outdated": [entry.id for entry in (*account.dead, *account.gone)],
    }
