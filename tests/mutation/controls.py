"""Wrong code that must stay refused, because right code never runs the lines that refuse it.

Each function returns names, and functions that return whether the code is still treated rightly.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

Control = tuple[str, Callable[[], bool]]

_HOOKS = (
    "def match_prefx(self, request, num_computed_tokens): return 0",  # "prefix" is misspelled
    "def take_evnt(self): return []",  # the words are alike, although the names are not
    "def request_finished(self, request): return None",  # a hook of vLLM
    "def on_transfers_completed(self, results): return None",  # "finished" in other words
    "def get_finished(self): return []",  # a hook of the other half
    "def match_prefix(self, request): return 0",  # takes too few arguments
    "def match_prefix(self, request, num_tokens, more): return 0",
    "async def plan_step(self, step): return None",
    "def plan_step(self, step): yield",
    "match_prefix = property(lambda self: 0)",
    "plan_step = None",
)
"""Bodies of a scheduler half with a method that no engine calls."""

_HELPER = "def make_event(self): return None"
"""A method whose name is not close enough to ``take_events`` to be refused."""

_LEFT_OUT = {
    "RemembersRequests": "it runs for 40 s",
    "LeasesHalf": "it breaks another law first",
}
"""Wrong connectors that are not played here."""


@cache
def law_examples() -> Sequence[Control]:
    """The scripts of docs/law_examples.toml, which fail because of an injected fault."""
    from docs.law_examples import examples

    return [
        (f"the example of {law}", example.fails_with_its_fault)
        for law, example in examples().items()
        if example.body
    ]


@cache
def connectors() -> Sequence[Control]:
    """The wrong connectors that the kit refuses by their law, one for each law."""
    from docs.law_examples import examples
    from tests.mutants import MUTANTS
    from tests.mutants.mutant import Mutant

    def is_refused(fault: Mutant) -> bool:
        failure = fault.first_failure()
        return failure is not None and failure.law == fault.law

    by_name = {fault.name: fault for fault in MUTANTS}
    return [
        (f"{example.fault} ({law})", partial(is_refused, by_name[example.fault]))
        for law, example in examples().items()
        if not example.body and example.fault not in _LEFT_OUT
    ]


@cache
def classes() -> Sequence[Control]:
    """Classes that are refused when they are made, and one that is not."""
    from kvview.targets import load_target

    def is_refused(body: str, mixin: str = "...") -> bool:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "wrong.py")
            file.write_text(
                f"import kvview\n\n\nclass Mixin:\n    {mixin}\n\n\n"
                f"class Wrong(Mixin, kvview.SchedulerConnector):\n    {body}\n"
            )
            try:
                load_target(f"{file}:Wrong")
            except Exception as error:
                return "ConnectorDefinitionError" in str(error)
        return False

    wrong = [(body, partial(is_refused, body)) for body in _HOOKS]
    mixed = ("a mixin with a misspelled hook", partial(is_refused, "...", _HOOKS[0]))
    return [*wrong, mixed, (_HELPER, lambda: not is_refused(_HELPER))]


@cache
def faults_in_vllm() -> Sequence[Control]:
    """Connectors whose hooks raise, which the adapter contains unless the engine must end."""
    from kvview.errors import ConnectorError
    from tests.vllm.engine import hooks_that_fail, serve_with_fault

    def is_contained(hook: str, ends: bool) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            try:
                serve_with_fault(Path(folder), hook)
            except ConnectorError as error:
                return ends and "planted" in str(error)
        return not ends

    return [
        (f"a connector that fails in {hook}", partial(is_contained, hook, ends))
        for hook, ends in hooks_that_fail().items()
    ]


@cache
def failed_loads_in_vllm() -> Sequence[Control]:
    """A connector whose loads fail, in a release that accepts no reports of failed loads."""

    def is_refused() -> bool:
        from kvview.testing.connector import check_connector, load_engines
        from tests.vllm.faulty_connectors import FailingConnector

        runs = check_connector(
            FailingConnector, first_seed=1, seeds=1, engines=load_engines("vllm"), max_shrink_runs=0
        )
        return any(
            "does not accept reports of failed loads" in one.message for one in runs.failures
        )

    return [("a connector whose loads fail", is_refused)]
