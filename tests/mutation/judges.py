"""The verdict of the kit: every check over every harness, every run of every connector."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

SEEDS = 40  # of each connector; `kvview check` runs 200 by default
RARE = (83, 109)  # of the 200: the first run with caps of clients and a small tier; a steady run
FEW, SLICE = 6, 20  # seeds of one step: first a few, then up to each multiple
_MULTI = "kvview_reference.connector:MultiConnector"
_STORE = "kvview_reference.store_connector:StoreConnector"
_OFFLOAD = "kvview_reference.store_connector:StoreConnector"
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

    def steps(self, num_seeds: int) -> Iterator[Step]:
        """Yield every step of the kit over this target.

        Args:
            num_seeds: Of a connector, in slices; random calls start before this number.
        """
        if not _is_run(self.load()):
            for first, end in pairwise([0, *self.examples]):
                if first < num_seeds:
                    yield Step(self, range(first, end))
            return
        ends = [end for end in (FEW, *range(SLICE, num_seeds, SLICE)) if end < num_seeds]
        for first, end in pairwise([0, *ends, num_seeds]):
            yield Step(self, range(first, end))
        for rare in RARE:
            if FEW < num_seeds <= rare:
                yield Step(self, range(rare, rare + 1))

    def run(self, seeds: range, coverage: Counter[str]) -> str | None:
        """Return the finding of the kit; None when it is green.

        Args:
            seeds: Of the runs of a connector, or of the random sequences of calls of a harness.
            coverage: The events of the runs are added to it.
        """
        target = self.load()
        if _is_run(target):
            return self._simulate(target, seeds, coverage)
        return self._check(target, seeds)

    def load(self) -> Any:
        """The factory or the connector."""
        from kvview.testing.handoff import pd_factory
        from kvview.testing.offloading.policy import as_factory

        found = _attribute(self.target)
        return pd_factory(found, self.engine) if self.is_pd else as_factory(found)

    def _check(self, factory: Any, seeds: range) -> str | None:
        from kvview.testing.effort import Effort
        from kvview.testing.runner import plan_checks, run_planned

        # Only the verdict counts, so no script is made.
        effort = Effort(is_brief=True, seed=seeds.start, seeds=len(seeds), options=self.options)
        for planned in plan_checks(factory, Effort(options=self.options))[1]:
            failure = run_planned(factory, planned, effort).failure
            if failure is not None:
                return f"{failure.law} {planned.check.name}"
        return None

    def _simulate(self, connector: Any, seeds: range, coverage: Counter[str]) -> str | None:
        from kvview.testing.connector import check_connector, load_engines

        report = check_connector(
            connector,
            first_seed=seeds.start,
            seeds=len(seeds),
            options=self.options,
            engines=load_engines(self.engine),
            max_shrink_runs=0,
            processes=0,
        )
        coverage.update(report.coverage)
        return next((f"{one.law} seed {one.seed}" for one in report.failures), None)


@dataclass(frozen=True)
class Step:
    """The smallest part of the kit that runs alone: all checks of a target, with some seeds.

    Args:
        subject: The target.
        seeds: Its seeds.
    """

    subject: Subject
    seeds: range

    def __str__(self) -> str:
        return f"{self.subject} seeds {self.seeds.start}-{self.seeds.stop - 1}"

    def run(self, coverage: Counter[str]) -> str | None:
        """Return the finding of the kit; None when it is green."""
        return self.subject.run(self.seeds, coverage)


@dataclass(frozen=True)
class WrongCode(Subject):
    """Wrong code, which must stay refused; a seed is the number of one piece of it.

    The target is a function of :mod:`~tests.mutation.controls`.
    """

    def steps(self, num_seeds: int) -> Iterator[Step]:
        return (Step(self, range(number, number + 1)) for number in range(len(self.load())))

    def run(self, seeds: range, coverage: Counter[str]) -> str | None:
        for name, is_refused in self.load()[seeds.start : seeds.stop]:
            if not is_refused():
                return f"{name}: not refused any more"
        return None

    def load(self) -> Sequence[tuple[str, Callable[[], bool]]]:
        controls: Sequence[tuple[str, Callable[[], bool]]] = _attribute(self.target)()
        return controls


def _attribute(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


SUBJECTS = [
    *(
        Subject(f"kvview_reference.harness:{name}")
        for name in (
            "pool",
            "offloading_lru",
            "offloading_arc",
            "transfer",
        )
    ),
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
    Subject(_OFFLOAD, {"policy": "kvview_reference.offloading.policies:ARCPolicy"}),
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
    *(Subject(f"kvview_reference.harness:{name}", examples=(25,)) for name in ("tier",)),
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
OLD_VLLM_SUBJECTS = [one for one in VLLM_SUBJECTS if not one.is_pd]
WRONG_SUBJECTS = [
    WrongCode(f"tests.mutation.controls:{name}")
    for name in ("law_examples", "connectors", "classes")
]
WRONG_VLLM_SUBJECTS = [WrongCode("tests.mutation.controls:faults_in_vllm")]
WRONG_OLD_VLLM_SUBJECTS = [
    *WRONG_VLLM_SUBJECTS,
    WrongCode("tests.mutation.controls:failed_loads_in_vllm"),
]


def _is_run(target: Any) -> bool:
    """Return whether a target is a connector, which runs in an engine."""
    from kvview.targets import is_connector, is_engine_connector

    return is_connector(target) or is_engine_connector(target)


def not_checked(coverage: Counter[str]) -> str | None:
    """Return an event that no run of a connector exercised; None when there is none."""
    from kvview.testing.connector.coverage import not_exercised

    gaps = not_exercised(coverage)
    return f"not checked: {gaps[0]}" if gaps else None
