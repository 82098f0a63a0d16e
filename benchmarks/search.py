"""Compare the kit's search with Hypothesis' stateful machines, by kills per CPU second.

    python benchmarks/search.py [--mutants 80] [--seed 0] [--processes 1] [--seconds 10]

Both play the same players and models on the same mutants of the reference, with as many runs and
moves as the profile ``ci``, without shrinking, and end at the first failure. The searches differ
only in the choice of moves: the kit draws a subset and a size for each run, and Hypothesis
chooses among rules, one for each operation. The table has the kills of both, and the CPU seconds
of each search, those on survivors included. Both must be green without a mutant.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import click

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.mutation.processes import Say, forget, import_instead, run_forked  # noqa: E402
from tests.mutation.trial import OWN, all_sites, warm_up  # noqa: E402

ROOMS = {
    "pool": (
        "kvview.testing.pool.player:PoolPlayer",
        "pool",
        ("kvview_reference.pool", "kvview_reference.free_queue", "kvview_reference.walks"),
    ),
    "geometry": (
        "kvview.testing.geometry.player:GeometryPlayer",
        "geometry",
        ("kvview_reference.geometry.coordinator", "kvview_reference.geometry.kv_cache_manager"),
    ),
    "offloading": (
        "kvview.testing.offloading.player:ManagerPlayer",
        "offloading_arc",
        ("kvview_reference.offloading.manager", "kvview_reference.offloading.policies"),
    ),
}
"""By room: its player, its harness, and the modules of which mutants are drawn."""


def kit(player_class: Any, factory: Callable[[], Any]) -> bool:
    """Search as the kit does; return whether a law broke."""
    from kvview.testing.profiles import Effort, make_profile
    from kvview.testing.search import search

    profile = replace(make_profile(Effort()), is_brief=True)
    return bool(search(player_class, factory, profile).failures)


def hypothesis(player_class: Any, factory: Callable[[], Any]) -> bool:
    """Let a stateful machine choose the moves; return whether a law broke."""
    import hypothesis as h
    from hypothesis import stateful
    from hypothesis import strategies as st

    from kvview.testing.profiles import Effort, make_profile
    from kvview.testing.recorder import LawBroken
    from kvview.testing.search import Plan

    profile = make_profile(Effort())
    seeds = st.integers(0, 2**32 - 1)

    def begin(self: Any, seed: int) -> None:
        self.player = player_class(factory, Plan(seed))
        able = self.player._marked(True, self.player.harness.capabilities)
        self.player.play([(name, seed) for name in self.player.first_moves if name in able])

    def rule(name: str) -> Any:
        def move(self: Any, seed: int) -> None:
            able = self.player._marked(True, self.player.harness.capabilities)
            if not self.player.is_over and name in able:
                self.player.play([(name, seed)])

        move.__name__ = name
        return stateful.rule(seed=seeds)(move)

    rules = {name: rule(name) for name in player_class._marked(True, factory().capabilities)}
    rules["begin"] = stateful.initialize(seed=seeds)(begin)
    machine = type("Machine", (stateful.RuleBasedStateMachine,), rules)
    settings = h.settings(
        max_examples=profile.num_examples,
        stateful_step_count=profile.num_steps,
        phases=[h.Phase.generate],
        suppress_health_check=list(h.HealthCheck),
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
    )
    try:
        stateful.run_state_machine_as_test(machine, settings=settings)
    except LawBroken:
        return True
    return False


SEARCHES = {"kit": kit, "Hypothesis": hypothesis}


def load(name: str) -> Any:
    """Import an object by ``module:name``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@click.command()
@click.option("--mutants", default=80, help="Number of mutants of all modules together.")
@click.option("--seed", default=0, help="Seed of the draw.")
@click.option("--processes", default=1, help="Mutants that are played at a time.")
@click.option("--seconds", default=10, help="CPU seconds that a search may take on one mutant.")
def main(mutants: int, seed: int, processes: int, seconds: int) -> None:
    """Play both searches on the same mutants and print a table."""
    warm_up()
    rooms = {module: room for room, (_, _, modules) in ROOMS.items() for module in modules}
    sites = Random(seed).sample(all_sites([*rooms]), mutants)

    def run(job: Any, say: Say) -> None:
        site, name = job
        player, harness, _ = ROOMS[rooms[site.module]]
        from tests.mutation.trial import _wrong

        import_instead(
            lambda module, path: _wrong(module, site.id, path) if module == site.module else None
        )
        forget(OWN)
        factory = load(f"kvview_reference.harness:{harness}")
        player_class = load(player)
        start = time.process_time()
        try:
            is_killed = SEARCHES[name](player_class, factory)
        except Exception:  # a mutant that breaks the harness is a kill for either search
            is_killed = True
        say((is_killed, time.process_time() - start))

    for room, (player, harness, _) in ROOMS.items():
        for name, search in SEARCHES.items():
            start = time.process_time()
            if search(load(player), load(f"kvview_reference.harness:{harness}")):
                raise click.ClickException(f"{name} finds a fault in the right {room}")
            click.echo(f"right {room}, {name}: {time.process_time() - start:.1f} CPU seconds")

    jobs = [(site, name) for site in sites for name in SEARCHES]
    found: dict[str, dict[str, tuple[bool, float]]] = {name: {} for name in SEARCHES}
    for ended in run_forked(jobs, run, num_processes=processes, seconds=seconds):
        site, name = ended.job
        # Without an answer the mutant loops for ever or ends its process: a kill.
        found[name][site.id] = ended.said[-1] if ended.said else (True, float(seconds))
    click.echo("| search | kills | CPU seconds | kills per CPU second | median seconds of a kill |")
    click.echo("|---|---|---|---|---|")
    for name, results in found.items():
        killed = [taken for is_killed, taken in results.values() if is_killed]
        total = sum(taken for _, taken in results.values())
        row = f"{len(killed)} of {len(results)} | {total:.0f} | {len(killed) / total:.2f}"
        click.echo(f"| {name} | {row} | {median(killed):.2f} |")
    one, other = ({i for i, result in found[name].items() if result[0]} for name in SEARCHES)
    for title, ids in (("the kit", one - other), ("Hypothesis", other - one)):
        click.echo(f"\nKilled by {title} alone: {', '.join(sorted(ids)) or 'none'}")


if __name__ == "__main__":
    main()
