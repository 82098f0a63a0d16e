"""What a run must have exercised before it may be called green.

A connector that did nothing broke no law either: what never happened was not checked.
Most faults of connectors need two things at once, Mamba and a GPU hit, say, so what is
counted of loads are combinations, called cells: ``loads/several/mixed/mamba/gpu-hit/failed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from kvview.geometry import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.testing.connector.scenario import Scenario

FEWEST_SEEDS = 15
"""Seeds of a kind of geometry below which its cells are not judged, only counted."""

EVENTS_WANTED = "seeds that ask for events"
OF_THEIR_OWN_SIZE = "with a tier of its own size"
WITH_A_FULL_TIER = "with a tier that was full"
"""Blocks were stored again, before any load failed: they had been let go since."""
LOADS_LEFT_ALONE = "loads in runs without a failing medium"
FAILED_BY_THEMSELVES = "of these, loads that failed"
_MANY = 10  # one in so many loads
FEWEST_STEADY_SEEDS = 4
"""Steady runs below which it is not judged whether any of them loaded enough."""

_NEVER = {
    "stores": "nothing was ever stored",
    "hits": "match_prefix never promised anything",
    "loads": "nothing was ever loaded",
}
_SAY_WHICH = (
    "Name the option that says how much it holds, --option NAME={blocks} or NAME={bytes}, and the "
    "check chooses. A tier that holds all: expect it, with --expected-failures"
)
_SHAPES = {
    "one/equal": "one group",
    "several/equal": "several groups of one block size",
    "several/mixed": "several groups of several block sizes",
}
_KINDS: dict[str, tuple[type[CacheGroup], str]] = {
    "full": (FullAttention, "full attention"),
    "window": (SlidingWindow, "a sliding window"),
    "chunked": (ChunkedLocalAttention, "chunked attention"),
    "mamba": (Mamba, "Mamba"),
}
_HITS = {"no-gpu-hit": "nothing hit on the GPU", "gpu-hit": "a GPU hit before it"}
_ENDS = {"late": "late", "failed": "failed", "aborted": "aborted", "reset": "in flight at a reset"}


@dataclass(frozen=True)
class Gap:
    """Something that must happen in a run and did not.

    Args:
        name: Stable, for whoever has to say that it is expected: ``"loads"``, for example,
            or ``"loads/several/mixed/mamba/gpu-hit/failed"``.
        what: For people.
    """

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def rows_of(geometry: CacheGeometry) -> Iterator[str]:
    """The kinds of geometry that a geometry is one of: a name for each kind of group in it."""
    groups = geometry.groups
    sizes = "equal" if len({group.block_size for group in groups}) == 1 else "mixed"
    shape = f"{'one' if len(groups) == 1 else 'several'}/{sizes}"
    for name, (kind, _) in _KINDS.items():
        if any(isinstance(group, kind) for group in groups):
            yield f"{shape}/{name}"


def seeds_of(scenario: Scenario) -> Iterator[str]:
    """What a scenario counts as a seed of: kinds of geometry, and ends that loads may have."""
    if not scenario.cpu_blocks:
        return  # without a tier nothing is loaded
    is_possible = dict.fromkeys(_ENDS, scenario.loads_may_be_late)
    is_possible["failed"] = scenario.loads_may_fail
    hits = list(_HITS) if scenario.loads_beside_hits else ["no-gpu-hit"]
    for row in rows_of(scenario.geometry):
        yield f"seeds/{row}"
        for hit, end in product(hits, _ENDS):
            if is_possible[end]:
                yield f"seeds/{row}/{hit}/{end}"


def not_exercised(coverage: Mapping[str, int]) -> Sequence[Gap]:
    """What must happen in a run and did not.

    1. Without loads there are no cells to speak of, so only the first things are named.
    2. A kind of geometry is judged by the seeds that were played with it: what the engine
       left out, or what a few seeds did not draw, counts against nobody.
    3. One in ten seeds must show each of its cells: the generator aims at one a seed.
    4. Of at least four steady runs, one must load enough to compare its laps.
    5. An engine that never resets while loads are in flight leaves those cells out.
    6. A tier whose size the check could not choose must have been full, now and then: who holds
       all that it ever stored was not asked what it lets go.
    7. A connector that is asked for events and tells none is not green either; one that was
       not asked for them need not.

    Args:
        coverage: What happened how often, over all seeds.
    """
    gaps = [Gap(name, what) for name, what in _NEVER.items() if not coverage.get(name)]
    told = coverage.get(EVENTS_WANTED, 0)
    if told >= FEWEST_SEEDS and coverage.get("stores") and not coverage.get("events"):
        gaps.append(Gap("events", "enable_events is given, and no event was ever told"))
    if coverage.get("refused geometries"):
        what = f"the connector refused {coverage['refused geometries']} geometries"
        gaps.append(Gap("geometries", what))
    if not coverage.get("loads"):
        return gaps
    num_unsized, num_full = coverage.get(OF_THEIR_OWN_SIZE, 0), coverage.get(WITH_A_FULL_TIER, 0)
    if num_unsized >= FEWEST_SEEDS and num_full * 20 < num_unsized:
        what = f"in {num_full} of {num_unsized} runs the tier was full"
        gaps.append(Gap("full tier", f"{what}: what is let go was hardly seen. {_SAY_WHICH}"))
    num_steady = coverage.get("steady runs", 0)
    if num_steady >= FEWEST_STEADY_SEEDS and not coverage.get("steady runs to compare"):
        what = f"none of {num_steady} steady runs loaded enough to tell whether room is lost"
        gaps.append(Gap("steady", f"{what} (CONN-10)"))
    ends = [end for end in _ENDS if end != "reset" or coverage.get("resets with loads in flight")]
    for shape, kind, hit, end in product(_SHAPES, _KINDS, _HITS, ends):
        num_seeds = coverage.get(f"seeds/{shape}/{kind}/{hit}/{end}", 0)
        name = f"loads/{shape}/{kind}/{hit}/{end}"
        times, fewest = coverage.get(name, 0), num_seeds // 10
        if num_seeds >= FEWEST_SEEDS and times < fewest:
            what = f"{_SHAPES[shape]}, {_KINDS[kind][1]} among them, {_HITS[hit]}"
            what = f"loads {_ENDS[end]}, with {what}: {times} times, expected {fewest}"
            gaps.append(Gap(name, what))
    return gaps


def rates_of(coverage: Mapping[str, int]) -> list[tuple[str, float]]:
    """Shares for people, of what the runs did: by name; only those that there are."""
    count = coverage.get
    asked, hit = count("tokens asked about", 0), count("tokens hit on the GPU", 0)
    shares = [
        ("of all tokens, hit on the GPU", hit, asked),
        ("of the others, promised by the connector", count("tokens promised", 0), asked - hit),
    ]
    for kind in ("loads", "stores"):
        good = count(kind, 0)
        shares.append((f"of the {kind}, succeeded", good, good + count(f"failed {kind}", 0)))
    return [(name, part / whole) for name, part, whole in shares if whole > 0]


def is_cell(name: str) -> bool:
    """Whether a name in the coverage belongs into the table of cells."""
    return "/" in name


def table_of_cells(coverage: Mapping[str, int]) -> list[list[str]]:
    """How often each combination occurred, for people: a head, and a row a kind of geometry."""
    columns = list(product(_HITS, _ENDS))
    head = ["loads with", "seeds"]
    head += [f"{end}, GPU hit" if hit == "gpu-hit" else end for hit, end in columns]
    table = [head]
    for shape, kind in product(_SHAPES, _KINDS):
        row = f"{shape}/{kind}"
        if num_seeds := coverage.get(f"seeds/{row}"):
            cells = [str(coverage.get(f"loads/{row}/{hit}/{end}", 0)) for hit, end in columns]
            table.append([row, str(num_seeds), *cells])
    return table


REPLACED = "replaced: "
"""Prefix, in the coverage, of the name of a part of the connector that the engine replaced."""


def replaced_parts(coverage: Mapping[str, int]) -> Sequence[str]:
    """The parts of the connector that the engine replaced, so that they were not checked."""
    return [name.removeprefix(REPLACED) for name in sorted(coverage) if name.startswith(REPLACED)]


def notes_on(coverage: Mapping[str, int]) -> Iterator[str]:
    """Facts that break no law and that a reader must know."""
    for part in replaced_parts(coverage):
        yield f"the check replaced a part of the connector, which is therefore not checked: {part}"
    num_failed, num_loads = coverage.get(FAILED_BY_THEMSELVES, 0), coverage.get(LOADS_LEFT_ALONE, 0)
    if num_failed * _MANY > num_loads:
        yield (
            f"{num_failed} of {num_loads} loads failed in runs in which the check made none fail: "
            f"is what match_prefix promises still there? Each is computed again, and with vLLM's "
            f"kv_load_failure_policy 'fail' the answer is lost"
        )
