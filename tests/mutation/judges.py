"""The verdict of the kit: every check over every harness, every run of every connector."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

SEEDS = 40  # of each connector; `kvview check` runs 200 by default
RARE = (83, 109)  # of the 200: the first run with caps of clients and a small tier; a steady run
FEW, SLICE = 6, 20  # seeds of one step: first a few, then up to each multiple
_MULTI = "kvview_reference.connector:MultiConnector"
_STORE = "kvview:StoreConnector"
_OFFLOAD = "kvview_reference.connector:OffloadConnector"
_RAW = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector"
_FEW_PAGES = {"cpu_blocks": 40}


@dataclass(frozen=True)
class Subject:
    """A target of ``kvview check``.

    Args:
        target: Its name there.
        options: Of a connector or of a tier store.
        engine: That runs a connector.
        is_pd: Whether the connector passes handoffs between two engines.
        examples: Random sequences of calls of a harness, in slices.
    """

    target: str
    options: dict[str, Any] = field(default_factory=dict)
    engine: str = "reference"
    is_pd: bool = False
    examples: tuple[int, ...] = (10, 100)

    def __str__(self) -> str:
        children = self.options.get("connectors", ())
        names = [child["connector"].rpartition(":")[2] for child in children]
        given = [f"{name}={value}" for name, value in self.options.items() if not names]
        name = f"{self.target} of {', '.join(names)}" if names else self.target
        name = " with ".join((name, ", ".join(given))) if given else name
        return name if self.engine == "reference" else f"{name} in {self.engine}"

    def load(self) -> Any:
        """The factory or the connector."""
        from kvview.testing.handoff import pd_factory
        from kvview.testing.offloading.policy import as_factory

        module, _, name = self.target.partition(":")
        found = getattr(importlib.import_module(module), name)
        return pd_factory(found, self.engine) if self.is_pd else as_factory(found)


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
    Subject("kvview_reference.offloading.lru_or_arc:LRUOrARCPolicy"),
    Subject("kvview_reference.offloading.vllm_arc:VLLMARCPolicy"),
    Subject("kvview_reference.handoff.pull:PullConnector", is_pd=True, examples=(20,)),
    Subject("examples.host_cache:HostCacheConnector"),
    Subject("examples.host_memory:HostMemoryConnector", {"store_blocks": "{blocks}"}),
    Subject(
        "examples.two_levels:TwoLevelConnector",
        {"root": "{tmp}", "cpu_blocks": "{blocks}/4", "store_blocks": "{blocks}"},
    ),
    Subject(
        _STORE,
        {"cpu_bytes": "{bytes}", "mode": "exclusive", "enable_events": True},
    ),
    Subject(
        "examples.two_levels:TwoLevelConnector",
        {
            "store": "examples.folder_store:FolderStore",
            "root": "{tmp}",
            "cpu_blocks": "{blocks}/8",
            "weights": "1",
            "mode": "eager",
        },
    ),
    Subject("kvview.connector:Connector"),
    Subject(_OFFLOAD),
    Subject(
        _MULTI,
        {
            "connectors": [
                {"connector": _OFFLOAD, "options": {"enable_events": True}},
                {"connector": _STORE, "options": {"enable_events": True}},
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

TIER_SUBJECTS = [
    *(
        Subject(f"kvview_reference.harness:{name}", examples=(25,))
        for name in ("tier", "guarded_tier")
    ),
    Subject("kvview_reference.tier:ObjectStore", {"url": "file://{tmp}"}, examples=(10,)),
    Subject("examples.folder_store:FolderStore", {"root": "{tmp}"}, examples=(10,)),
    Subject("tests.tier.test_async_store:SlowDictionary", examples=(10,)),
]
VLLM_SUBJECTS = [
    Subject("tests.vllm.test_conformance:VLLMPool", examples=(10, 40)),
    Subject(
        "kvview_reference.handoff.pull:PullConnector", engine="vllm", is_pd=True, examples=(20,)
    ),
    Subject(_STORE, engine="vllm"),
    Subject(_OFFLOAD, {"enable_events": True}, engine="vllm"),
    Subject(
        _RAW,
        {
            "spec_name": "KVViewOffloadingSpec",
            "spec_module_path": "kvview_vllm.offloading_spec",
            "kvview": {"num_blocks": 40},
        },
        engine="vllm",
    ),
]


@dataclass(frozen=True)
class Step:
    """The smallest part of the kit that runs alone: all checks of a target, with some seeds.

    Args:
        subject: The target.
        seeds: Of the runs of a connector, or of the random sequences of calls of a harness.
    """

    subject: Subject
    seeds: range

    def __str__(self) -> str:
        return f"{self.subject} seeds {self.seeds.start}-{self.seeds.stop - 1}"

    def run(self, coverage: Counter[str]) -> str | None:
        """Return the finding of the kit; None when it is green.

        Args:
            coverage: The events of the runs are added to it.
        """
        target = self.subject.load()
        return self._simulate(target, coverage) if _is_run(target) else self._check(target)

    def _check(self, factory: Any) -> str | None:
        from kvview.testing.effort import Effort
        from kvview.testing.runner import plan_checks, run_planned

        # Only the verdict counts, so no script is made.
        options = self.subject.options
        effort = Effort(
            is_brief=True, seed=self.seeds.start, seeds=len(self.seeds), options=options
        )
        for planned in plan_checks(factory, Effort(options=options))[1]:
            failure = run_planned(factory, planned, effort).failure
            if failure is not None:
                return f"{failure.law} {planned.check.name}"
        return None

    def _simulate(self, connector: Any, coverage: Counter[str]) -> str | None:
        from kvview.testing.connector import check_connector, load_engines

        report = check_connector(
            connector,
            first_seed=self.seeds.start,
            seeds=len(self.seeds),
            options=self.subject.options,
            engines=load_engines(self.subject.engine),
            max_shrink_runs=0,
            processes=0,
        )
        coverage.update(report.coverage)
        return next((f"{one.law} seed {one.seed}" for one in report.failures), None)


def steps_of(subject: Subject, num_seeds: int) -> Iterator[Step]:
    """Yield every step of the kit over a target.

    Args:
        subject: The target.
        num_seeds: Of a connector, in slices.
    """
    if not _is_run(subject.load()):
        for first, end in pairwise([0, *subject.examples]):
            yield Step(subject, range(first, end))
        return
    ends = [end for end in (FEW, *range(SLICE, num_seeds, SLICE)) if end < num_seeds]
    for first, end in pairwise([0, *ends, num_seeds]):
        yield Step(subject, range(first, end))
    for rare in RARE:
        if FEW < num_seeds <= rare:
            yield Step(subject, range(rare, rare + 1))


def _is_run(target: Any) -> bool:
    """Return whether a target is a connector, which runs in an engine."""
    from kvview.targets import is_connector, is_engine_connector

    return is_connector(target) or is_engine_connector(target)


def not_checked(coverage: Counter[str]) -> str | None:
    """Return an event that no run of a connector exercised; None when there is none."""
    from kvview.testing.connector.coverage import not_exercised

    gaps = not_exercised(coverage)
    return f"not checked: {gaps[0]}" if gaps else None
