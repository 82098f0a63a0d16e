"""Plants drifts into the newest release's sources, and reports the drifts that get through.

    python tests/vllm/drifts.py [NAME ...] [--processes 2] [--json FILE]

The drifts are those of ``drifts.toml``. Each is planted into a copy of the sources (links, except
for the files that change) and played there in every way (:mod:`drift_plays`). A way *works* if it
saw the same as on the unchanged sources. It is *refused* if binding raises one line, and then
``kvview doctor`` must not report healthy. Every other drift got *through*, and so did one that
could not be played. ``kvview check`` may refuse a drift with which the adapter works, because it
reads more of vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drift_edits import (  # type: ignore[import-not-found]
    Drift,
    DriftError,
    Files,
    Sources,
    read_drifts,
)
from drift_plays import HARNESS, PLAYS, Answer, play_each, prepare  # type: ignore[import-not-found]

from kvview_vllm.releases.sources import sources
from kvview_vllm.releases.versions import RELEASES

NEWEST = RELEASES[-1]

# --- trees of sources ---


def plant(drift: Drift, number: int, files: Sources, folder: Path) -> None:
    """Write the sources with one drift into a folder, in place of its content."""
    changed = drift.apply(files)
    write_tree(files.folder, folder, changed)
    (folder / HARNESS).write_text(json.dumps(dict(drift.harness)))
    stamp = 1_000_000_000 + number  # compiled files are kept apart by it
    for path in changed:
        os.utime(folder / path, (stamp, stamp))


def write_tree(whole: Path, folder: Path, changed: Files) -> None:
    """Write sources with some files changed: links, except for these files and their folders."""
    if folder.exists():
        for path, folders, files in os.walk(folder, topdown=False):
            for name in (*files, *folders):
                one = Path(path, name)
                one.rmdir() if one.is_dir() and not one.is_symlink() else one.unlink()
        folder.rmdir()
    above = {str(parent) for path in changed for parent in Path(path).parents} | {"."}

    def write(inside: str) -> None:
        (folder / inside).mkdir()
        for one in (whole / inside).iterdir():
            path = os.path.normpath(Path(inside, one.name))
            if path in above:
                write(path)
            elif path in changed:
                (folder / path).write_text(changed[path])
            else:
                (folder / path).symlink_to(one)

    write(".")


# --- the verdict ---


@dataclass(frozen=True)
class Verdict:
    """The outcome of one drift.

    Args:
        name: Of the drift.
        outcomes: ``works``, ``refused``, or how it got through, by way.
        messages: The error, by way.
    """

    name: str
    outcomes: dict[str, str]
    messages: dict[str, str]

    @property
    def got_through(self) -> bool:
        """Whether a way neither works nor is refused, or doctor reports more health than it has."""
        ways = {way: outcome for way, outcome in self.outcomes.items() if way != "doctor"}
        if any(outcome not in ("works", "refused") for outcome in ways.values()):
            return True
        ways.pop("check", None)  # it reads more of vLLM than doctor reports on
        return "refused" in ways.values() and self.outcomes.get("doctor") != "refused"


def judge(name: str, answers: dict[str, Answer], normal: dict[str, Answer]) -> Verdict:
    """Compare the plays on a drift with those on the unchanged sources."""
    pairs = {way: _outcome(way, answer, normal.get(way)) for way, answer in answers.items()}
    outcomes = {way: outcome for way, (outcome, _) in pairs.items()}
    return Verdict(name, outcomes, {way: message for way, (_, message) in pairs.items()})


def _outcome(way: str, answer: Answer, normal: Answer | None) -> tuple[str, str]:
    stage, kind, message, saw = (answer[key] for key in ("stage", "kind", "error", "saw"))
    if way == "vllm":
        return "vLLM itself is broken", message
    if stage == "not played":
        return stage, message
    if way == "doctor" and stage == "done":
        return "refused" if saw else "healthy", "; ".join(f"{seam}: {text}" for seam, text in saw)
    if stage == "done":
        if normal is not None and saw == normal["saw"]:
            return "works", ""
        return "swallowed: it saw something else", "; ".join(saw) if way == "check" else ""
    if (stage, kind) == ("bind", "UnsupportedEngineError"):
        return "refused" if "\n" not in message else "refused in several lines", message
    return f"{kind} {'at bind' if stage == 'bind' else 'at a request'}", message


def play(drifts: Mapping[str, Drift], processes: int, ways: Sequence[str]) -> Iterator[Verdict]:
    """Plant drifts and play on each.

    Args:
        drifts: By name.
        processes: The number that run at a time.
        ways: Names of plays.

    Raises:
        DriftError: A drift does not fit the newest sources.
    """
    files = Sources(sources(NEWEST))
    files.all()
    normal = prepare(files.folder, ways)
    broken = {way: answer["error"] for way, answer in normal.items() if answer["stage"] != "done"}
    unhealthy = normal["doctor"]["saw"] if "doctor" in normal else None
    if broken or unhealthy:
        raise DriftError(f"the plays fail on the unchanged {NEWEST}: {broken} {unhealthy}")
    trees = [
        (name, partial(plant, drift, number, files))
        for number, (name, drift) in enumerate(drifts.items())
    ]
    with tempfile.TemporaryDirectory(prefix="kvview-drifts-") as scratch:
        for name, answers in play_each(trees, Path(scratch), processes):
            yield judge(name, answers, normal)


def main() -> int:
    parser = argparse.ArgumentParser(description="Drifts planted into the newest vLLM.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names; default: all")
    parser.add_argument("--ways", nargs="+", choices=PLAYS, default=list(PLAYS))
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts here")
    given = parser.parse_args()
    names = given.names or [""]
    chosen = {n: drift for n, drift in read_drifts().items() if any(part in n for part in names)}
    verdicts = []
    for verdict in play(chosen, given.processes, given.ways):
        verdicts.append(verdict)
        mark = "THROUGH" if verdict.got_through else "ok"
        ways = ", ".join(f"{way} {outcome}" for way, outcome in verdict.outcomes.items())
        print(f"{mark:8}{verdict.name}: {ways}", flush=True)
    through = [verdict for verdict in verdicts if verdict.got_through]
    print(f"{len(through)} of {len(verdicts)} drifts get through")
    if given.json:
        given.json.write_text(json.dumps([vars(one) for one in verdicts], indent=2) + "\n")
    return 1 if through else 0


if __name__ == "__main__":
    sys.exit(main())
