"""Wrong connectors as a table: each is an edit of the text of a right connector.

A file ``BASE.txt`` lists the mistakes in one right connector of :data:`BASES`. A wrong connector is
a file of its own when it runs, like a user's. Its text is that of the right one after the edits.
``unusual.txt`` has edits of the example that are right all the same. ``field.txt`` and
``with_options.txt`` have mistakes of the field, written with the docs and without the checks. Notes
beyond those of :mod:`edits`: ``in`` names the class if it is not that of the base, ``needs`` is the
way in which vLLM must run to show the mistake (``processes`` or ``async``), ``options`` has the
options, and ``gap`` is the part that a report leaves unchecked.

The injected faults (``MUTANTS``) are those with a law: one for each law of connectors, and those of
public incidents. ``benchmarks/first_seeds.py`` counts the mistakes that the kit finds, and
``tests/vllm/agreement.py`` serves with those of ``late.txt`` and ``field.txt`` in vLLM.

Ten harmless mistakes were removed when they survived, because none of them gives wrong bytes
or events, leaks, hangs or loses a response in any engine:

- "reuses a page that is being read" (host_cache), "evicts what is being loaded" (walker), "in
  use is never counted up" (each_step): these workers copy in the order of the plans, loads
  first, so the store over a page comes after the load that was planned before it (XFER-3).
- "takes loads out of the plan when their request is aborted" (host_cache), "drops the jobs of
  requests that were preempted" (walker): nothing is aborted or preempted between
  ``on_blocks_allocated`` and the ``plan_step`` that takes its loads, so nothing is dropped.
- "pending means loads" (walker): stores that are in flight when an idle engine stops are
  reported in its next step; their blocks are held until then.
- "protects the keys of loads in a set" (late): as in the first item.
- "keeps its pages in an attribute of the class" (host_memory): without the option ``weights``, the
  name of a page has the run.
- "one page too many", "one page too few, the last one" (each_step): a store that touches the
  page that does not exist fails, and reports it; the request computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from kvview import Connector
from kvview.testing import LawBroken
from kvview.testing.connector import check_connector
from kvview.testing.connector.exercised.coverage import not_exercised
from kvview.testing.connector.scenario.generate import STEADY_PLACES
from kvview.testing.connector.scenario.seed_order import in_order

from ..edits import ROOT, Base, Variant, read_variants
from ..mutant import Mutant

FOLDER = Path(__file__).parent
_EXAMPLE = ROOT / "examples" / "host_cache.py"
_MULTI = ROOT / "reference" / "kvview_reference" / "connector.py"

BASES = {
    "host_cache": Base("HostCacheConnector", (_EXAMPLE,)),
    "unusual": Base("HostCacheConnector", (_EXAMPLE,)),
    "late": Base("Late", (_EXAMPLE, FOLDER / "late.py")),
    "field": Base("Late", (_EXAMPLE, FOLDER / "late.py")),
    "two": Base("Two", (_MULTI, FOLDER / "two.py")),
    "walker": Base("Walker", (FOLDER / "walker.py",)),
    "each_step": Base("EachStep", (FOLDER / "each_step.py",)),
}
"""The right connectors, by the name of the file that lists edits of them."""
UNUSUAL = "unusual"
_WITH_OPTIONS = {
    "late": BASES["late"],
    "folder_store": Base("FolderConnector", (_EXAMPLE.with_stem("folder_store"),)),
    "host_memory": Base("HostMemoryConnector", (_EXAMPLE.with_stem("host_memory"),)),
}
"""The right connectors of ``with_options.txt``, by the family of their edits."""

NOT_EXERCISED = "coverage"
"""In place of a law, for a connector that breaks none and does not do its work."""

STEADY_SEEDS = [hundred + place for hundred in (100, 0) for place in STEADY_PLACES]
_SHORT_SEEDS = [seed for seed in in_order(0, 100) if seed not in STEADY_SEEDS]
_SEEDS = {
    "CONN-10": STEADY_SEEDS,
    NOT_EXERCISED: _SHORT_SEEDS[:8],
}
"""The seeds that show a fault, by its law; a steady run takes as long as ten others."""


def load_variants(base: str) -> Sequence[Variant]:
    """Return the variants of one right connector."""
    return read_variants(FOLDER / f"{base}.txt", BASES[base])


def load_with_options() -> list[Variant]:
    """Return the wrong connectors that need options, which are in their note ``options``."""
    variants = read_variants(FOLDER / "with_options.txt", BASES["late"])
    return [replace(variant, base=_WITH_OPTIONS[variant.family]) for variant in variants]


def load_wrong() -> list[Variant]:
    """Return all wrong connectors."""
    return [variant for base in BASES if base != UNUSUAL for variant in load_variants(base)]


def load_named(name: str) -> type[Connector]:
    """Return the class of a connector that has a name."""
    (found,) = (one for base in BASES for one in load_variants(base) if one.name == name)
    connector: type[Connector] = found.load()
    return connector


def __getattr__(name: str) -> type[Connector]:
    """Make ``kvview check tests.mutants.connector:NAME`` work."""
    try:
        return load_named(name)
    except ValueError:
        raise AttributeError(name) from None


@dataclass(frozen=True)
class ConnectorMutant(Mutant):
    """One injected fault; its factory is the class."""

    def first_failure(self) -> LawBroken | None:
        """Simulate it, seed after seed, until its law is broken; otherwise another broken law."""
        connector = cast("type[Connector]", self.factory)
        broken: LawBroken | None = None
        coverage: Counter[str] = Counter()
        for seed in _SEEDS.get(self.law, [*_SHORT_SEEDS, *STEADY_SEEDS]):
            report = check_connector(connector, seeds=1, first_seed=seed, max_shrink_runs=0)
            coverage.update(report.coverage)
            for failure in report.failures:
                if broken is None or failure.law == self.law:
                    broken = LawBroken(
                        failure.law,
                        self.what,
                        got=failure.message,
                        expected="no law broken in any seed",
                        script=failure.script,
                    )
            if broken is not None and broken.law == self.law:
                return broken
        for gap in () if broken else not_exercised(coverage):
            return LawBroken(
                NOT_EXERCISED, self.what, got=str(gap), expected="it happens", script=""
            )
        return broken


MUTANTS: list[Mutant] = [
    ConnectorMutant(variant.load(), variant.law, f"{variant.what}.", variant.incident)
    for variant in load_wrong()
    if variant.law
]
