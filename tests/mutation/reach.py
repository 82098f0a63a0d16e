"""The statements that each step of the kit executes, so that a mutant is played by few steps."""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import Any

from .areas import AREAS, OWN, ROOT, folder_of
from .judges import Step, Subject
from .operators import statement_lines
from .processes import Limit, Say, forget, import_instead, run_forked

SLOWER = 8  # factor by which a mutant may be slower than the right code
AT_LEAST = 10.0
REACHED = "KVVIEW_REACHED"
_HITS = "_lines_reached"
_LONGEST_TARGET = 600.0  # seconds of all steps of a target on the right code
_CACHE = Path.home() / ".cache" / "kvview" / "mutation"
_AT_START = Path(__file__).with_name("at_start")  # for processes that a check starts itself
_SOURCES = {".py", ".toml", ".txt"}

Place = tuple[str, int]  # module, line of a statement


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
        return Limit(AT_LEAST + SLOWER * self.seconds)


def fingerprint() -> str:
    """Return a fingerprint of all sources that a verdict depends on."""
    folders = [folder_of(package) for package in OWN if package != "docs"]
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in _SOURCES]
    paths += (ROOT / "docs").glob("law_examples.*")
    paths += (Path(__file__).with_name(f"{name}.py") for name in ("areas", "controls", "judges"))
    digest = sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def measure_reach(name: str, num_seeds: int) -> list[Reach]:
    """Run each step of the kit once, and return the statements that it executes.

    Args:
        name: Of the area; the results are kept for each state of the sources.
        num_seeds: Of each connector.

    Raises:
        RuntimeError: A step is not green on the right code.
    """
    subjects, modules = AREAS[name].subjects, AREAS[name].modules
    file = _CACHE / f"reach-{name.replace(' ', '-')}-{num_seeds}-{fingerprint()}.json"
    reached = list(_read(file, subjects))
    done = {str(one.step.subject) for one in reached}
    for subject in subjects:
        if str(subject) in done:
            continue

        def run(say: Say, subject: Subject = subject) -> None:
            hits = Hits()
            tell_processes(REACHED, f"{hits.path}:{','.join(modules)}")
            import_instead(
                lambda name, path: counting(name, path, hits) if name in modules else None
            )
            forget(OWN)
            for step in subject.steps(num_seeds):
                hits.clear()
                start, coverage = time.process_time(), Counter[str]()
                found = step.run(coverage)
                taken = time.process_time() - start
                say((Reach(step, hits.all(), taken, coverage), found))

        ended = run_forked(run, seconds=_LONGEST_TARGET)
        for one, found in ended.said:
            if found is not None:
                raise RuntimeError(f"{one.step} is not green without a mutant: {found}")
            reached.append(one)
        if ended.why:
            raise RuntimeError(f"the checks of {subject}: {ended.why}")
        _write(file, reached)
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


def tell_processes(name: str, value: str) -> None:
    """Make processes that this one starts import ``at_start/sitecustomize.py`` first."""
    os.environ[name] = value
    sys.path.insert(0, str(_AT_START))


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
