"""Runs the kit on mutants, and reports those that live."""

from __future__ import annotations

import importlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any

from .areas import AREAS, OWN, path_of
from .judges import SEEDS, not_checked
from .operators import Site, find_sites, mutate
from .processes import Ended, Room, Say, forget, import_instead, run_forked
from .reach import AT_LEAST, REACHED, Hits, Reach, counting, measure_reach, tell_processes

_MUTANT = "KVVIEW_MUTANT"


@dataclass(frozen=True)
class Verdict:
    """The verdict of the kit on a mutant.

    Args:
        site: The mutant.
        killed_by: The first finding; empty for a survivor.
        how: ``"check"``, ``"not checked"`` (a run that was not exercised), ``"import"``,
            ``"timeout"``, ``"died"`` or ``"wrong code"`` (wrong code is not refused any more);
            empty for a survivor.
        num_steps: The number of steps that execute the mutant.
        seconds: Wall-clock time.
        num_seeds: The number of seeds of each connector.
        cpu_seconds: CPU time of the kit.
        area: The area of the first finding; empty for a survivor.
    """

    site: Site
    killed_by: str
    how: str
    num_steps: int
    seconds: float
    num_seeds: int = SEEDS
    cpu_seconds: float = 0.0
    area: str = ""

    @property
    def is_killed(self) -> bool:
        """Whether the kit was not green."""
        return bool(self.how)


def all_sites(modules: Iterable[str]) -> list[Site]:
    """Return every mutant of these modules."""
    return [site for module in modules for site in find_sites(module, path_of(module).read_text())]


@contextmanager
def open_rooms(names: Iterable[str], num_seeds: int) -> Iterator[Mapping[str, Room]]:
    """Start a process for each area, which measures its reach or plays a mutant.

    Args:
        names: Of the areas.
        num_seeds: Of each connector.
    """
    rooms: dict[str, Room] = {}

    def make(name: str) -> Callable[[Site | None], Any]:
        AREAS[name].warm_up()
        reach = measure_reach(name, num_seeds)
        return lambda site: reach if site is None else play(site, reach, num_seeds)

    try:
        for name in names:
            rooms[name] = Room(lambda name=name: make(name))  # type: ignore[misc]
        yield rooms
    finally:
        for room in rooms.values():
            room.close()


def judge(site: Site, rooms: Mapping[str, Callable[[Site], Verdict]]) -> Verdict:
    """Play a mutant in one area after the other, up to the first finding.

    Args:
        site: The mutant.
        rooms: The areas, by name; those with wrong code come last.
    """
    verdict: Verdict | None = None
    for name, play_there in rooms.items():
        now = play_there(site)
        if now.is_killed:
            now = replace(now, area=name, how="wrong code" if AREAS[name].are_wrong else now.how)
        if verdict is not None:
            now = replace(
                now,
                num_steps=verdict.num_steps + now.num_steps,
                seconds=verdict.seconds + now.seconds,
                cpu_seconds=verdict.cpu_seconds + now.cpu_seconds,
            )
        verdict = now
        if now.is_killed:
            break
    assert verdict is not None, "there is no area"
    return verdict


def play(site: Site, reach: Sequence[Reach], num_seeds: int = SEEDS) -> Verdict:
    """Run the steps of an area on a mutant, up to the first finding.

    1. A step that does not execute the wrong statement is skipped.
    2. The first seeds of every target run before later seeds, and quick steps before slow ones.
    3. Without another finding, the events of all seeds of a connector are checked for gaps, if the
       right code has none with these seeds.

    Args:
        site: The mutant.
        reach: From :func:`~tests.mutation.reach.measure_reach`.
        num_seeds: Of each connector.
    """
    start = time.monotonic()
    steps = steps_for(site, reach)
    if not steps:
        return Verdict(site, "", "", 0, 0.0, num_seeds)

    def run(say: Say) -> None:
        tell_processes(_MUTANT, site.id)
        make_wrong(site.id)
        forget(OWN)
        say(("import", ""))
        importlib.import_module(site.module)
        coverage: defaultdict[str, Counter[str]] = defaultdict(Counter)
        right: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for one in reach:
            right[str(one.step.subject)].update(one.coverage)
            if one not in steps:
                coverage[str(one.step.subject)].update(one.coverage)
        for one in steps:
            say(one.limit)
            say(("step", str(one.step)))
            found = one.step.run(coverage[str(one.step.subject)])
            if found is not None:
                say(("found", found))
                return
        for target in {str(one.step.subject) for one in steps if one.coverage}:
            found = not_checked(coverage[target])
            if found and not not_checked(right[target]):
                say(("found", found))
                return
        say(("green", ""))

    ended = run_forked(run, seconds=AT_LEAST)
    killed_by, how = _outcome(ended)
    seconds = time.monotonic() - start
    return Verdict(site, killed_by, how, len(steps), seconds, num_seeds, ended.cpu_seconds)


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


def begin_as_told() -> None:
    """Apply the mutant, or count statements, in a process that a check has started."""
    if site_id := os.environ.get(_MUTANT):
        make_wrong(site_id)
    elif reached := os.environ.get(REACHED):
        path, _, names = reached.partition(":")
        hits, modules = Hits(path), names.split(",")
        import_instead(lambda name, path: counting(name, path, hits) if name in modules else None)


def _outcome(ended: Ended) -> tuple[str, str]:
    """Return the first finding and its kind; both are empty for a survivor."""
    said: Mapping[str, str] = dict(ended.said)  # the last message of each kind
    last = ended.said[-1][0] if ended.said else "import"
    killed_by = said.get("step", "import")
    if last == "found":
        killed_by = said["found"]
        return killed_by, "not checked" if killed_by.startswith("not checked") else "check"
    if ended.why == "timeout":
        return killed_by, "timeout"
    if last != "green":
        return killed_by, "import" if last == "import" else "died"
    return "", ""
