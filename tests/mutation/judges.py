"""The verdict of the kit: every check over every harness, every run of every connector."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

SEEDS = 40  # of each connector; `kvview check` runs 200 by default
STEADY = 109  # of the 200, the first steady run without resets
FEW, SLICE = 6, 20  # seeds of one step: first a few, then up to each multiple
_MULTI = "kvview_reference.connector:MultiConnector"
_LAZY = "kvview_reference.connector:LazyOffloadConnector"
_OFFLOAD = "kvview_reference.connector:OffloadConnector"
_FEW_PAGES = {"cpu_blocks": 40}


@dataclass(frozen=True)
class Subject:
    """A target of ``kvview check``.

    Args:
        target: Its name there.
        options: Of a connector.
    """

    target: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        children = self.options.get("connectors", ())
        names = [child["connector"].rpartition(":")[2] for child in children]
        return f"{self.target} of {', '.join(names)}" if names else self.target

    def load(self) -> Any:
        """The factory or the connector."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)


SUBJECTS = [
    *(
        Subject(f"kvview_reference.harness:{name}")
        for name in (
            "pool",
            "guarded_pool",
            "geometry",
            "offloading_lru",
            "offloading_arc",
            "transfer",
        )
    ),
    Subject("examples.host_cache:HostCacheConnector"),
    Subject(_OFFLOAD),
    Subject(_LAZY),
    Subject(_MULTI, {"connectors": [{"connector": _OFFLOAD}]}),
    Subject(
        _MULTI,
        {
            "connectors": [
                {"connector": _OFFLOAD, "options": {"enable_events": True}},
                {"connector": _LAZY, "options": {"enable_events": True}},
            ]
        },
    ),
    Subject(
        _MULTI,
        {
            "connectors": [
                {"connector": "tests.connector.spy:SpyConnector"},
                {"connector": "examples.host_cache:HostCacheConnector", "options": _FEW_PAGES},
                {"connector": _OFFLOAD, "options": {"enable_events": True}},
            ]
        },
    ),
]

TIER_EXAMPLES = 25  # random sequences of calls; `kvview check` plays 100 by default
TIER_SUBJECTS = [Subject(f"kvview_reference.harness:{name}") for name in ("tier", "guarded_tier")]


@dataclass(frozen=True)
class Step:
    """The smallest part of the kit that runs alone.

    Args:
        subject: The target.
        name: Of the check; empty for runs of a connector.
        seeds: Of the runs.
    """

    subject: Subject
    name: str = ""
    seeds: range = range(0)

    def __str__(self) -> str:
        seeds = f"seeds {self.seeds.start}-{self.seeds.stop - 1}" if self.seeds else ""
        return f"{self.subject} {self.name}{seeds}"

    def run(self, coverage: Counter[str]) -> str | None:
        """Return the finding of the kit; None when it is green.

        Args:
            coverage: The events of the runs are added to it.
        """
        return self._simulate(coverage) if self.seeds else self._check()

    def _check(self) -> str | None:
        from kvview.testing.profiles import Effort, make_profile
        from kvview.testing.runner import plan_checks, run_planned

        factory = self.subject.load()
        # Only the verdict counts, so no script is made.
        profile = replace(make_profile(Effort()), is_brief=True)
        if self.subject in TIER_SUBJECTS:
            profile = replace(profile, num_examples=TIER_EXAMPLES)
        for planned in plan_checks(factory, Effort(), select=[self.name])[1]:
            failure = run_planned(factory, planned, profile).failure
            if failure is not None:
                return f"{failure.law} {self.name}"
        return None

    def _simulate(self, coverage: Counter[str]) -> str | None:
        from kvview.testing.connector import check_connector

        report = check_connector(
            self.subject.load(),
            first_seed=self.seeds.start,
            seeds=len(self.seeds),
            options=self.subject.options,
            max_shrink_runs=0,
        )
        coverage.update(report.coverage)
        return next((f"{one.law} seed {one.seed}" for one in report.failures), None)


def steps_of(subject: Subject, num_seeds: int) -> Iterator[Step]:
    """Yield every step of the kit over a target.

    Args:
        subject: The target.
        num_seeds: Of a connector, in slices.
    """
    from kvview.targets import is_connector
    from kvview.testing.profiles import Effort
    from kvview.testing.runner import plan_checks

    loaded = subject.load()
    if is_connector(loaded):
        ends = [end for end in (FEW, *range(SLICE, num_seeds, SLICE)) if end < num_seeds]
        for first, end in pairwise([0, *ends, num_seeds]):
            yield Step(subject, seeds=range(first, end))
        if FEW < num_seeds <= STEADY:
            yield Step(subject, seeds=range(STEADY, STEADY + 1))
        return
    for planned in plan_checks(loaded, Effort())[1]:
        if not planned.skip_reason:
            yield Step(subject, planned.check.name)


def not_checked(coverage: Counter[str]) -> str | None:
    """Return an event that no run of a connector exercised; None when there is none."""
    from kvview.testing.connector.coverage import not_exercised

    gaps = not_exercised(coverage)
    return f"not checked: {gaps[0]}" if gaps else None
