"""What the kit has to say: every check over every harness, every run of every connector."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SEEDS = 200  # as `kvview check` runs a connector by default
_LAZY = "kvview_reference.connector:LazyOffloadConnector"
_OFFLOAD = "kvview_reference.connector:OffloadConnector"


@dataclass(frozen=True)
class Subject:
    """A target of ``kvview check``.

    Args:
        target: As it is named there.
        options: Of a connector.
    """

    target: str
    options: dict[str, Any] = field(default_factory=dict)

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
    Subject(
        "kvview_reference.connector:MultiConnector",
        {
            "connectors": [
                {"connector": _OFFLOAD, "options": {"enable_events": True}},
                {"connector": _LAZY, "options": {"enable_events": True}},
            ]
        },
    ),
]


@dataclass(frozen=True)
class Step:
    """The smallest part of the kit that can be run alone.

    Args:
        subject: Of which target.
        name: Of the check; empty for the runs of a connector.
    """

    subject: Subject
    name: str = ""

    def __str__(self) -> str:
        return f"{self.subject.target} {self.name}".strip()

    def run(self) -> str | None:
        """What the kit finds; None when it is green."""
        return self._check() if self.name else self._simulate()

    def _check(self) -> str | None:
        from kvview.testing import machines
        from kvview.testing.profiles import Effort, make_profile
        from kvview.testing.runner import plan_checks, run_planned

        machines.MAX_SHRINK_RUNS = 0  # the verdict is wanted, no script
        factory = self.subject.load()
        for planned in plan_checks(factory, Effort(), select=[self.name])[1]:
            failure = run_planned(factory, planned, make_profile(Effort())).failure
            if failure is not None:
                return f"{failure.law} {self.name}"
        return None

    def _simulate(self) -> str | None:
        from kvview.testing.connector import check_connector

        found: list[str] = []

        def stop(done: int, failed: int) -> None:
            if failed:
                raise KeyboardInterrupt  # as anybody ends a run that has failed already

        report = check_connector(
            self.subject.load(),
            seeds=SEEDS,
            options=self.subject.options,
            on_progress=stop,
            max_shrink_runs=0,
        )
        found += [f"{one.law} seed {one.seed}" for one in report.failures]
        found += [f"not checked: {line}" for line in report.not_exercised]
        return found[0] if found else None


def steps_of(subject: Subject) -> Iterator[Step]:
    """All that the kit runs over a target."""
    from kvview.targets import is_connector
    from kvview.testing.profiles import Effort
    from kvview.testing.runner import plan_checks

    loaded = subject.load()
    if is_connector(loaded):
        yield Step(subject)
        return
    for planned in plan_checks(loaded, Effort())[1]:
        if not planned.skip_reason:
            yield Step(subject, planned.check.name)
