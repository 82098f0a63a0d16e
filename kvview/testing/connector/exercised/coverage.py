"""Events that runs must have exercised before a connector may be called green.

A connector that does nothing breaks no law, but a run with such a connector checks no law. Most
faults of connectors need two conditions at once, such as Mamba and a GPU hit. So loads are counted
by combinations of conditions, called cells, such as ``loads/several/mixed/mamba/gpu-hit/failed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from kvview.geometry import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.testing.connector.scenario.scenario import Scenario
from kvview.testing.results.law_broken import Gap

FEWEST_SEEDS = 15
"""Minimum number of seeds with a kind of geometry for its cells to be required."""

EVENTS_WANTED = "seeds that ask for events"
OF_THEIR_OWN_SIZE = "with the default size of its tier"
WITH_A_FULL_TIER = "with a tier that was full"
"""The event that blocks were stored again without a failed load, so they had been evicted."""
LEFT_ALONE = {kind: f"{kind} without an injected failure" for kind in ("stores", "loads")}
"""The counts of stores and of loads in which the check injected no failure."""
FAILED_BY_THEMSELVES = {kind: f"of these, {kind} that failed" for kind in LEFT_ALONE}
FEWEST_STEADY_SEEDS = 4
"""Minimum number of steady runs for one of them to be required to load enough."""

_NEVER = {
    "stores": "nothing was ever stored",
    "hits": "match_prefix never promised anything",
    "loads": "nothing was ever loaded",
}
_SAY_WHICH = (
    "Name the option that limits the tier, --option NAME='{blocks}' or NAME='{bytes}', so that the "
    "check chooses the limit. If the tier has no limit, name the gap in --expected"
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


def rows_of(geometry: CacheGeometry) -> Iterator[str]:
    """Yield the names of a geometry in cells, one for each kind of group in the geometry."""
    groups = geometry.groups
    sizes = "equal" if len({group.block_size for group in groups}) == 1 else "mixed"
    shape = f"{'one' if len(groups) == 1 else 'several'}/{sizes}"
    for name, (kind, _) in _KINDS.items():
        if any(isinstance(group, kind) for group in groups):
            yield f"{shape}/{name}"


def seeds_of(scenario: Scenario) -> Iterator[str]:
    """Yield the names under which a scenario is counted: kinds of geometry and results of loads."""
    if not scenario.cpu_blocks:
        return  # without a tier no block is loaded
    is_possible = dict.fromkeys(_ENDS, scenario.loads_may_be_late)
    is_possible["failed"] = scenario.loads_may_fail
    hits = list(_HITS) if scenario.loads_after_hits else ["no-gpu-hit"]
    for row in rows_of(scenario.geometry):
        yield f"seeds/{row}"
        for hit, end in product(hits, _ENDS):
            if is_possible[end]:
                yield f"seeds/{row}/{hit}/{end}"


def not_exercised(coverage: Mapping[str, int]) -> Sequence[Gap]:
    """List the events that runs must exercise but did not.

    1. Without loads, cells are not checked.
    2. The cells of a kind of geometry are required only if enough seeds had this kind. Kinds that
       the engine cannot simulate, or that only few seeds have, are not required.
    3. Each cell must occur at least once in ten seeds, although the generator aims at once per
       seed.
    4. If there are four or more steady runs, at least one of them must load enough for a comparison
       of its rounds.
    5. If an engine never resets while loads are in flight, the cells of resets during loads are not
       required.
    6. If the check could not choose the size of a tier, the tier must have been full in one of
       twenty runs, because a tier that is never full never evicts.
    7. A connector with the option ``enable_events`` must report events.

    Args:
        coverage: Number of occurrences of each event, over all seeds.
    """
    gaps = [Gap(name, what) for name, what in _NEVER.items() if not coverage.get(name)]
    told = coverage.get(EVENTS_WANTED, 0)
    if told >= FEWEST_SEEDS and coverage.get("stores") and not coverage.get("events"):
        gaps.append(Gap("events", "enable_events is given, but no event was ever reported"))
    if coverage.get("refused geometries"):
        what = f"the connector refused {coverage['refused geometries']} geometries"
        gaps.append(Gap("geometries", what))
    if not coverage.get("loads"):
        return gaps
    num_unsized, num_full = coverage.get(OF_THEIR_OWN_SIZE, 0), coverage.get(WITH_A_FULL_TIER, 0)
    if num_unsized >= FEWEST_SEEDS and num_full * 20 < num_unsized:
        what = f"in {num_full} of {num_unsized} runs the tier was full"
        gaps.append(Gap("full tier", f"{what}, so eviction was hardly exercised. {_SAY_WHICH}"))
    num_steady = coverage.get("steady runs", 0)
    is_compared = coverage.get("steady runs to compare") or coverage.get(IN_REAL_TIME)
    if num_steady >= FEWEST_STEADY_SEEDS and not is_compared:
        what = f"none of {num_steady} steady runs loaded enough to show whether the tier loses room"
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


IN_REAL_TIME = "threads or processes in real time"
"""Coverage name for a raw connector that has some, so its transfers take time instead of steps."""
REPLACED = "replaced: "
"""Prefix of the coverage names of parts of the connector that the engine replaced."""


def replaced_parts(coverage: Mapping[str, int]) -> Sequence[str]:
    """Return the parts of the connector that were not checked, because the engine replaced them."""
    return [name.removeprefix(REPLACED) for name in sorted(coverage) if name.startswith(REPLACED)]


def notes_on(coverage: Mapping[str, int]) -> Iterator[str]:
    """Yield notes for the reader about facts that break no law."""
    for part in replaced_parts(coverage):
        yield f"the check replaced a part of the connector, which is therefore not checked: {part}"


def failed_by_themselves(
    coverage: Mapping[str, int], first_error: str, *, may_evict: bool = False
) -> Iterator[Gap]:
    """Describe the stores and loads that failed although the check injected no failure.

    A server computes the blocks of a failed load again, or fails the request
    (``kv_load_failure_policy`` "fail" of vLLM). So a connector with such failed loads is useless,
    and its faults after a load stay hidden.

    Args:
        coverage: Number of occurrences of each event, over all seeds.
        first_error: The exception behind the first of these failures, with its line of source;
            empty if unknown.
        may_evict: Whether a store of pages may have evicted them, because the connector does not
            know how many pages the store holds.
    """
    error = first_error and f"; the first: {first_error}"
    for kind, failed in FAILED_BY_THEMSELVES.items():
        num_failed = coverage.get(failed, 0)
        if not num_failed:
            continue
        num_jobs = coverage[LEFT_ALONE[kind]]
        text = f"{num_failed} of {num_jobs} {kind} failed without an injected failure{error}"
        if may_evict and kind == "loads":
            text += (
                ". If the store evicts pages by itself, let the connector evict instead (--option "
                "store_blocks='{blocks}', without weights and without a limit of the store's own), "
                "or name 'coverage: failed loads' with this reason in --expected"
            )
        yield Gap(f"failed {kind}", text)


def is_headline(failed: Gap, coverage: Mapping[str, int]) -> bool:
    """Whether failures make the check incomplete: any load, or more than half of all stores."""
    num_failed = coverage.get(FAILED_BY_THEMSELVES["stores"], 0)
    num_stores = coverage.get(LEFT_ALONE["stores"], 0)
    return failed.name != "failed stores" or 2 * num_failed > num_stores
