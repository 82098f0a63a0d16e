"""Plays mutants against the kit, and says which live."""

from __future__ import annotations

import ast
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from .judges import SUBJECTS, Step, Subject, steps_of
from .operators import Site, find_sites, mutate, statement_lines
from .processes import Ended, Say, forget, import_instead, run_forked

ROOT = Path(__file__).parents[2]
OWN = ("kvview", "kvview_reference", "examples")
MODULES = (
    "kvview_reference.pool",
    "kvview_reference.walks",
    "kvview_reference.events",
    "kvview_reference.guard",
    "kvview_reference.geometry.coordinator",
    "kvview_reference.geometry.kv_cache_manager",
    "kvview_reference.offloading.manager",
    "kvview_reference.offloading.policies",
    "kvview_reference.transfer.worker",
    "kvview_reference.transfer.pages",
    "kvview_reference.connector.offload",
    "kvview_reference.connector.lazy_offload",
    "kvview_reference.connector.multi",
    "kvview.guard.view",
    "kvview.guard.ledger",
    "kvview.guard.lease",
    "examples.host_cache",
)

_HITS = "_lines_reached"
_REACH_SECONDS = 300.0
_SLOWER = 8  # a mutant may be so many times slower than what is right
_AT_LEAST = 20.0

Place = tuple[str, int]  # module, line of a statement


@dataclass(frozen=True)
class Reach:
    """What one step of the kit executes, and what it costs.

    Args:
        step: The step.
        places: Statements inside functions that it executes.
        seconds: That it takes, CPU time.
    """

    step: Step
    places: frozenset[Place]
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """What the kit says of a mutant.

    Args:
        site: The mutant.
        killed_by: What was found first; empty for a survivor.
        how: ``"check"``, ``"run"``, ``"not checked"`` (a run that was not exercised),
            ``"import"``, ``"timeout"`` or ``"died"``; empty for a survivor.
        num_steps: Of the kit, that execute what was made wrong.
        seconds: That it took.
    """

    site: Site
    killed_by: str
    how: str
    num_steps: int
    seconds: float

    @property
    def is_killed(self) -> bool:
        """Whether the kit was not green."""
        return bool(self.how)


def source_of(module: str) -> str:
    """The text of a module, without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    assert spec.origin is not None, f"{module} has no source"
    return Path(spec.origin).read_text()


def all_sites(modules: Sequence[str] = MODULES) -> list[Site]:
    """Every mutant of these modules."""
    return [site for module in modules for site in find_sites(module, source_of(module))]


def warm_up() -> None:
    """Import what is slow to import and is not ours, once for all forked processes."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    for name in ("torch", "numpy", "hypothesis.stateful", "pydantic", "click", "rich.table"):
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)  # a pool of threads does not live through a fork


def measure_reach(
    subjects: Sequence[Subject] = SUBJECTS,
    *,
    num_processes: int = 1,
    modules: Sequence[str] = MODULES,
) -> list[Reach]:
    """Which statements each step of the kit executes, found by running it once.

    Raises:
        RuntimeError: A step is not green on what is right.
    """

    def run(subject: Subject, say: Say) -> None:
        hits: set[Place] = set()
        import_instead(lambda name, path: counting(name, path, hits) if name in modules else None)
        forget(OWN)
        for step in steps_of(subject):
            hits.clear()
            start = time.process_time()
            found = step.run()
            say((step, found, frozenset(hits), time.process_time() - start))

    reached = []
    for ended in run_forked(subjects, run, num_processes=num_processes, seconds=_REACH_SECONDS):
        for step, found, places, seconds in ended.said:
            if found is not None:
                raise RuntimeError(f"{step} is not green without a mutant: {found}")
            reached.append(Reach(step, places, seconds))
        if ended.why:
            raise RuntimeError(f"the checks of {ended.job.target}: {ended.why}")
    return reached


def counting(name: str, path: Path, hits: set[Place]) -> CodeType:
    """A module that notes each statement of its functions when it is executed."""
    import builtins

    setattr(builtins, _HITS, hits.add)
    tree = ast.parse(path.read_text())
    blocks: dict[int, tuple[list[ast.stmt], list[int]]] = {}
    for block, at in statement_lines(tree):
        blocks.setdefault(id(block), (block, []))[1].append(at)
    for block, places in blocks.values():
        for at in sorted(set(places), reverse=True):
            place = repr((name, block[at].lineno))
            note = ast.parse(f"{_HITS}({place})").body[0]
            block.insert(at, ast.copy_location(note, block[at]))
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


def play(
    sites: Iterable[Site],
    reach: Sequence[Reach],
    *,
    num_processes: int = 1,
    on_verdict: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Run the kit on each mutant until it finds something.

    A step that does not execute the statement that is wrong has nothing to say and is left
    out; the others run the quickest first.

    Args:
        sites: The mutants.
        reach: From :func:`measure_reach`.
        num_processes: At a time.
        on_verdict: Told of each as it comes.
    """
    started: dict[str, float] = {}

    def jobs() -> Iterator[tuple[Site, list[Reach]]]:
        for site in sites:
            started[site.id] = time.monotonic()
            yield site, steps_for(site, reach)

    def run(job: tuple[Site, list[Reach]], say: Say) -> None:
        site, steps = job
        import_instead(lambda name, path: _wrong(site, path) if name == site.module else None)
        forget(OWN)
        say(("import", ""))
        importlib.import_module(site.module)
        for one in steps:
            say(("step", str(one.step)))
            found = one.step.run()
            if found is not None:
                say(("found", found))
                return
        say(("green", ""))

    seconds = max(_AT_LEAST, _SLOWER * max((one.seconds for one in reach), default=0.0))
    seconds += sum(one.seconds for one in reach)
    verdicts = []
    for ended in run_forked(jobs(), run, num_processes=num_processes, seconds=seconds):
        verdict = _verdict(ended, time.monotonic() - started[ended.job[0].id])
        verdicts.append(verdict)
        if on_verdict is not None:
            on_verdict(verdict)
    return verdicts


def steps_for(site: Site, reach: Sequence[Reach]) -> list[Reach]:
    """The steps that execute a mutant, the quickest first."""
    place = site.module, site.line
    steps = [one for one in reach if not site.is_in_function or place in one.places]
    return sorted(steps, key=lambda one: one.seconds)


def _wrong(site: Site, path: Path) -> CodeType:
    return compile(mutate(site.module, path.read_text(), site.id), str(path), "exec")


def _verdict(ended: Ended[tuple[Site, list[Reach]]], seconds: float) -> Verdict:
    site, steps = ended.job
    said: Mapping[str, str] = dict(ended.said)  # the last of each kind
    last = ended.said[-1][0] if ended.said else "import"
    killed_by, how = said.get("step", "import"), ""
    if last == "found":
        killed_by = said["found"]
        how = "not checked" if killed_by.startswith("not checked") else "check"
    elif ended.why == "timeout":
        how = "timeout"
    elif last != "green":
        how = "import" if last == "import" else "died"
    return Verdict(site, killed_by if how else "", how, len(steps), seconds)
