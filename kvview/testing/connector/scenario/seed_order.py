"""The seeds that run first, because they detect most faults (see ``benchmarks/first_seeds.py``)."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_SEEDS: tuple[int, ...] = (1, 8, 3, 10, 7, 19, 9, 109, 0, 2, 102)


def in_order(first_seed: int, number: int) -> Sequence[int]:
    """Return consecutive seeds, with the seeds of :data:`FIRST_SEEDS` first."""
    seeds = range(first_seed, first_seed + number)
    first = [seed for seed in FIRST_SEEDS if seed in seeds]
    return [*first, *(seed for seed in seeds if seed not in first)]
