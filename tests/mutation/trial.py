"""Runs the kit on mutants, and reports those that live."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import Any

from . import judges
from .judges import RARE, SEEDS, Step, Subject, not_checked, steps_of
from .operators import Site, find_sites, mutate, statement_lines
from .processes import Ended, Limit, Say, forget, import_instead, run_forked

ROOT = Path(__file__).parents[2]
OWN = ("kvview", "kvview_reference", "kvview_vllm", "examples")
NEVER_WRONG = {
    "kvview.testing": "the kit itself",
    "kvview_reference.engine": "the engine of the kit",
    "kvview_reference.simulation": "the engine of the kit",
    "kvview_reference.harness": "harnesses of the kit",
    "kvview_vllm.simulation": "the engine of the kit",
    "kvview.connector.hook_errors": "the kit itself: texts about hooks that raise",
    **dict.fromkeys(
        (
            "kvview_vllm.pool_canary",
            "kvview_vllm.connector.canary_half",
            "kvview_vllm.connector.connector_canary",
            "kvview_vllm.connector.scheduler_canary",
            "kvview_vllm.offloading.offloading_canary",
        ),
        "checks of vLLM when a connector starts, which edits of vLLM test",
    ),
    "kvview_vllm.metrics": "log lines and metrics for people",
    "kvview_vllm.tier_metrics": "log lines and metrics for people",
    "kvview_vllm.releases": "finds and reads the sources of a release",
    **dict.fromkeys(
        (
            "kvview.cli",
            "kvview.targets",
            "kvview.options",
            "kvview.version",
            "kvview.laws",
            "kvview.urls",
            "kvview.input_files",
            "kvview.__main__",
            "kvview_reference.sizing",
            "kvview_reference.replay",
            "kvview_reference.tier.command",
            "kvview_reference.tier.throughput",
            "kvview_vllm.doctor",
            "kvview_vllm.inference",
            "kvview_vllm.partition",
            "kvview_vllm.handoff",
        ),
        "part of a command",
    ),
}
"""Modules and packages that are never made wrong, with the reason."""

_HITS = "_lines_reached"
_SLOWER = 8  # factor by which a mutant may be slower than the right code
_AT_LEAST = 10.0
_LONGEST_STEP = 400.0  # seconds of a step on the right code
_CACHE = Path.home() / ".cache" / "kvview" / "mutation"
_AT_START = Path(__file__).with_name("at_start")  # for processes that a check starts itself
_MUTANT, _REACHED = "KVVIEW_MUTANT", "KVVIEW_REACHED"

Place = tuple[str, int]  # module, line of a statement


def path_of(module: str) -> Path:
    """Return the file of a module, without an import of its packages."""
    package, *rest = module.split(".")
    path = _folder_of(package).joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"there is no package {package}"
    return Path(next(iter(spec.submodule_search_locations or ())))


def modules_of(*packages: str, but: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the modules of packages that may be made wrong.

    Args:
        packages: The packages.
        but: Modules and packages that belong to another area.
    """
    left_out = (*NEVER_WRONG, *but)
    found = []
    for package in packages:
        root = path_of(package).parent
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            if not any(f"{name}.".startswith(f"{one}.") for one in left_out):
                found.append(name)
    return tuple(found)


@dataclass(frozen=True)
class Area:
    """Modules that are made wrong, and the targets of the kit.

    Args:
        modules: The modules.
        subjects: The targets.
    """

    modules: Sequence[str]
    subjects: Sequence[Subject]


_TIER = ("kvview.tier", "kvview_reference.tier")
AREAS = {
    "engine": Area(
        (
            *modules_of("kvview", "kvview_reference", but=_TIER),
            *("examples.host_cache", "examples.host_memory", "examples.two_levels"),
        ),
        judges.SUBJECTS,
    ),
    "tier": Area(modules_of(*_TIER), judges.TIER_SUBJECTS),
    "vllm": Area(modules_of("kvview_vllm"), judges.VLLM_SUBJECTS),
}
"""Separate areas, because the targets of one are slow, or do not execute the modules of another.

``vllm`` needs the Python of the vLLM lane.
"""


@dataclass(frozen=True)
class Reach:
    """The statements that one step of the kit executes, and its cost.

    Args:
        step: The step.
        places: The statements inside functions.
        seconds: CPU time.
        coverage: The events of its runs.
    """

    step: Step
    places: frozenset[Place]
    seconds: float
    coverage: Counter[str] = field(default_factory=Counter)

    @cached_property
    def modules(self) -> frozenset[str]:
        """The modules that it executes."""
        return frozenset(module for module, _ in self.places)

    @property
    def cost(self) -> tuple[int, float]:
        """The order of steps: the first seeds of every target, later seeds."""
        return self.step.seeds.start, self.seconds

    @property
    def limit(self) -> Limit:
        """The time that it may take with a mutant."""
        return Limit(_AT_LEAST + _SLOWER * self.seconds)


@dataclass(frozen=True)
class Verdict:
    """The verdict of the kit on a mutant.

    Args:
        site: The mutant.
        killed_by: The first finding; empty for a survivor.
        how: ``"check"``, ``"run"``, ``"not checked"`` (a run that was not exercised),
            ``"import"``, ``"timeout"`` or ``"died"``; empty for a survivor.
        num_steps: The number of steps that execute the mutant.
        seconds: Wall-clock time.
        num_seeds: The number of seeds of each connector.
        cpu_seconds: CPU time of the kit.
    """

    site: Site
    killed_by: str
    how: str
    num_steps: int
    seconds: float
    num_seeds: int = SEEDS
    cpu_seconds: float = 0.0

    @property
    def is_killed(self) -> bool:
        """Whether the kit was not green."""
        return bool(self.how)


def all_sites(modules: Iterable[str]) -> list[Site]:
    """Return every mutant of these modules."""
    return [site for module in modules for site in find_sites(module, path_of(module).read_text())]


def warm_up(*, with_vllm: bool = False) -> None:
    """Import slow packages once for all forked processes."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    slow = ("torch", "numpy", "hypothesis.stateful", "pydantic", "click", "rich.table", "xxhash")
    of_vllm = ("vllm.v1.core.sched.scheduler", "vllm.v1.core.block_pool", "vllm.v1.request")
    for name in (*slow, *(of_vllm if with_vllm else ())):
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)  # a pool of threads does not survive a fork


def fingerprint() -> str:
    """Return a fingerprint of all sources that a verdict depends on."""
    digest = sha256(Path(judges.__file__).read_bytes())
    for package in OWN:
        root = _folder_of(package)
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def measure_reach(
    area: Area,
    name: str,
    *,
    num_seeds: int = SEEDS,
    num_processes: int = 1,
) -> list[Reach]:
    """Run each step of the kit once, and return the statements that it executes.

    Args:
        area: The targets, and the modules with the statements.
        name: Of the area; the results are kept for each state of the sources.
        num_seeds: Of each connector.
        num_processes: Number at a time.

    Raises:
        RuntimeError: A step is not green on the right code.
    """
    subjects, modules = area.subjects, area.modules
    file = _CACHE / f"reach-{name}-{fingerprint()}.json"
    known = {str(one.step): one for one in _read(file, subjects)}

    def run(subject: Subject, say: Say) -> None:
        hits = Hits()
        _tell_processes(_REACHED, f"{hits.path}:{','.join(modules)}")
        import_instead(lambda name, path: counting(name, path, hits) if name in modules else None)
        forget(OWN)
        for step in steps_of(subject, num_seeds):
            if step.seeds.start >= num_seeds and step.seeds.start not in RARE:
                continue
            if one := known.get(str(step)):
                say((one, None))
                continue
            hits.clear()
            start, coverage = time.process_time(), Counter[str]()
            found = step.run(coverage)
            taken = time.process_time() - start
            say((Reach(step, hits.all(), taken, coverage), found))

    reached: list[Reach] = []
    for ended in run_forked(subjects, run, num_processes=num_processes, seconds=_LONGEST_STEP):
        for one, found in ended.said:
            if found is not None:
                raise RuntimeError(f"{one.step} is not green without a mutant: {found}")
            reached.append(one)
        if ended.why:
            raise RuntimeError(f"the checks of {ended.job}: {ended.why}")
        _write(file, {**known, **{str(one.step): one for one in reached}}.values())
    return reached


def _write(file: Path, reached: Iterable[Reach]) -> None:
    rows = [
        {
            "target": str(one.step.subject),
            "seeds": [one.step.seeds.start, one.step.seeds.stop],
            "places": sorted(one.places),
            "seconds": one.seconds,
            "coverage": one.coverage,
        }
        for one in reached
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(rows))
    part.replace(file)


def _read(file: Path, subjects: Sequence[Subject]) -> Iterator[Reach]:
    of_target = {str(subject): subject for subject in subjects}
    for row in json.loads(file.read_text()) if file.is_file() else ():
        if row["target"] in of_target:
            step = Step(of_target[row["target"]], range(*row["seeds"]))
            places = frozenset((module, line) for module, line in row["places"])
            yield Reach(step, places, row["seconds"], Counter(row["coverage"]))


class Hits(set[Place]):
    """Places that were executed, in this process and in those that it forked or started.

    Args:
        path: File of the process that collects them; None in that process.
    """

    def __init__(self, path: str | None = None) -> None:
        self._home = 0 if path else os.getpid()
        self._away: Any = (  # open as long as this object
            open(path, "ab", 0) if path else tempfile.NamedTemporaryFile("a+b", 0)  # noqa: SIM115
        )
        self.path: str = self._away.name

    def add(self, place: Place) -> None:
        """Add a place."""
        if place not in self:
            super().add(place)
            if os.getpid() != self._home:
                self._away.write(f"{place[0]} {place[1]}\n".encode())

    def clear(self) -> None:
        """Remove all places."""
        super().clear()
        self._away.seek(0)
        self._away.truncate()

    def all(self) -> frozenset[Place]:
        """Return all places."""
        self._away.seek(0)
        lines = (line.decode().split() for line in self._away.read().splitlines())
        return frozenset(self) | {(module, int(line)) for module, line in lines}


def _tell_processes(name: str, value: str) -> None:
    """Make processes that this one starts import ``at_start/sitecustomize.py`` first."""
    os.environ[name] = value
    sys.path.insert(0, str(_AT_START))


def begin_as_told() -> None:
    """Apply the mutant, or count statements, in a process that a check has started."""
    if site_id := os.environ.get(_MUTANT):
        make_wrong(site_id)
    elif told := os.environ.get(_REACHED):
        path, _, names = told.partition(":")
        hits, modules = Hits(path), names.split(",")
        import_instead(lambda name, path: counting(name, path, hits) if name in modules else None)


def counting(name: str, path: Path, hits: set[Place]) -> CodeType:
    """Compile a module that records each statement of its functions when it is executed."""
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
    num_seeds: int = SEEDS,
    green: Mapping[str, int] | None = None,
    on_verdict: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Run the kit on each mutant, up to the first finding.

    1. A step that does not execute the wrong statement is skipped.
    2. The first seeds of every target run before later seeds, and quick steps before slow ones.
       A slice of random calls runs only if it starts before the number of seeds.
    3. Without another finding, the events of all seeds of a connector are checked for gaps, if the
       right code has none with these seeds.

    Args:
        sites: The mutants.
        reach: From :func:`measure_reach`.
        num_processes: Number at a time.
        num_seeds: Of each connector.
        green: Numbers of seeds with which mutants are known to live, by id; only later seeds run.
        on_verdict: Called with each verdict.
    """
    started: dict[str, float] = {}
    green = green or {}
    reach = [one for one in reach if one.coverage or one.step.seeds.start < num_seeds]
    right: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in reach:
        right[str(one.step.subject)].update(one.coverage)

    def jobs() -> Iterator[tuple[Site, list[Reach]]]:
        for site in sites:
            started[site.id] = time.monotonic()
            yield site, steps_for(site, reach)

    def run(job: tuple[Site, list[Reach]], say: Say) -> None:
        site, steps = job
        _tell_processes(_MUTANT, site.id)
        make_wrong(site.id)
        forget(OWN)
        say(("import", ""))
        importlib.import_module(site.module)
        coverage = {str(one.step.subject): Counter[str]() for one in reach if one.coverage}
        before = green.get(site.id, 0)
        for one in reach:
            if one not in steps:
                coverage.get(str(one.step.subject), Counter()).update(one.coverage)
        for one in steps:
            seen = coverage.get(str(one.step.subject), Counter())
            seeds = one.step.seeds
            if seeds.stop <= before if one.coverage else seeds.start < before:
                seen.update(one.coverage)  # the coverage of that run is unknown
                continue
            say(one.limit)
            say(("step", str(one.step)))
            found = one.step.run(seen)
            if found is not None:
                say(("found", found))
                return
        for target in {str(one.step.subject) for one in steps if one.coverage}:
            found = not_checked(coverage[target])
            if found and not not_checked(right[target]):
                say(("found", found))
                return
        say(("green", ""))

    verdicts = []
    for ended in run_forked(jobs(), run, num_processes=num_processes, seconds=_AT_LEAST):
        verdict = _verdict(ended, time.monotonic() - started[ended.job[0].id], num_seeds)
        verdicts.append(verdict)
        if on_verdict is not None:
            on_verdict(verdict)
    return verdicts


def steps_for(site: Site, reach: Sequence[Reach]) -> list[Reach]:
    """Return the steps that execute a mutant, the quickest first."""
    place = site.module, site.line
    steps = [
        one
        for one in reach
        if (place in one.places if site.is_in_function else site.module in one.modules)
    ]
    return sorted(steps, key=lambda one: one.cost)


def make_wrong(site_id: str) -> None:
    """Make the next import of the mutant's module wrong."""
    module = site_id.partition(":")[0]

    def wrong(name: str, path: Path) -> CodeType | None:
        if name != module:
            return None
        return compile(mutate(name, path.read_text(), site_id), str(path), "exec")

    import_instead(wrong)


def _verdict(ended: Ended[tuple[Site, list[Reach]]], seconds: float, num_seeds: int) -> Verdict:
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
    killed_by = killed_by if how else ""
    return Verdict(site, killed_by, how, len(steps), seconds, num_seeds, ended.cpu_seconds)
