"""Drifts planted into the newest release's sources: what gets through to a request?

    python tests/vllm/drifts.py [NAME ...] [--draw N --seed N] [--processes 2] [--json FILE]

A drift is what a later release could rename, reorder, add or take away, after what vLLM did
between 0.11 and 0.33. Each is planted into sources of its own (links, but for the files that
change) and played there, every way in (:mod:`drift_plays`). A way in either *works*: it saw
what the same play sees on the sources as they are; or it is *refused* in one line when it is
bound, and then ``kvview doctor`` does not say healthy. All else got *through*, a play that could
not be played too. ``kvview check`` may refuse where the adapter works: it reads more of vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import drift_connector  # type: ignore[import-not-found]  # noqa: F401 - its drifts
import drift_facts  # type: ignore[import-not-found]  # noqa: F401
import drift_memory  # type: ignore[import-not-found]  # noqa: F401
from drift_draws import draw  # type: ignore[import-not-found]
from drift_edits import DRIFTS, DriftError, Files, Sources  # type: ignore[import-not-found]
from drift_plays import HARNESS, PLAYS, Answer, play_each, prepare  # type: ignore[import-not-found]

from kvview_vllm.releases.sources import sources
from kvview_vllm.releases.versions import RELEASES

NEWEST = RELEASES[-1]

# --- trees of sources ---


def plant(name: str, files: Sources, folder: Path) -> None:
    """Write the sources with one drift into a folder, in place of what is there."""
    changed = DRIFTS[name].apply(files)
    write_tree(files.folder, folder, changed)
    (folder / HARNESS).write_text(json.dumps(DRIFTS[name].harness))
    stamp = 1_000_000_000 + list(DRIFTS).index(name)  # by it compiled files are told apart
    for path in changed:
        os.utime(folder / path, (stamp, stamp))


def write_tree(whole: Path, folder: Path, changed: Files) -> None:
    """Sources with some files changed: links, but for those and the folders above them."""
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
    """What became of one drift.

    Args:
        name: Of the drift.
        outcomes: ``works``, ``refused``, or how it got through, by way in.
        messages: What was said, by way in.
    """

    name: str
    outcomes: dict[str, str]
    messages: dict[str, str]

    @property
    def got_through(self) -> bool:
        """Whether anything is neither seen to work nor refused, or doctor healthier than it."""
        ways = {way: outcome for way, outcome in self.outcomes.items() if way != "doctor"}
        if any(outcome not in ("works", "refused") for outcome in ways.values()):
            return True
        ways.pop("check", None)  # it reads more of vLLM than what doctor speaks of
        return "refused" in ways.values() and self.outcomes.get("doctor") != "refused"


def judge(name: str, answers: dict[str, Answer], normal: dict[str, Answer]) -> Verdict:
    """Compare a drift's answers with those of the sources as they are."""
    outcomes: dict[str, str] = {}
    messages: dict[str, str] = {}
    for way, answer in answers.items():
        said = str(answer["error"])
        if way == "vllm":
            outcomes[way] = "vLLM itself is broken"
        elif way == "doctor" and answer["stage"] == "done":
            outcomes[way] = "refused" if answer["saw"] else "healthy"
            said = "; ".join(f"{seam}: {detail}" for seam, detail in answer["saw"])
        elif answer["stage"] == "done":
            same = answer["saw"] == normal[way]["saw"]
            outcomes[way] = "works" if same else "swallowed: it saw something else"
            said = "" if same or way != "check" else "; ".join(answer["saw"])
        elif answer["stage"] == "not played":
            outcomes[way] = "not played"
        elif answer["stage"] == "bind" and answer["kind"] == "UnsupportedEngineError":
            outcomes[way] = "refused" if "\n" not in said else "refused in several lines"
        else:
            when = "at bind" if answer["stage"] == "bind" else "at a request"
            outcomes[way] = f"{answer['kind']} {when}"
        messages[way] = said
    return Verdict(name, outcomes, messages)


def play(names: Sequence[str], processes: int, ways: Sequence[str]) -> Iterator[Verdict]:
    """Plant drifts and play on each.

    Args:
        names: Of the drifts.
        processes: How many at a time.
        ways: Which plays, by name.

    Raises:
        DriftError: A drift does not fit the newest sources.
    """
    files = Sources(sources(NEWEST))
    files.all()
    normal = prepare(files.folder, ways)
    broken = {way: answer["error"] for way, answer in normal.items() if answer["stage"] != "done"}
    ill = normal["doctor"]["saw"] if "doctor" in normal else None
    if broken or ill:
        raise DriftError(f"{NEWEST} as it is does not play: {broken} {ill}")
    trees = [(name, partial(plant, name, files)) for name in names]
    with tempfile.TemporaryDirectory(prefix="kvview-drifts-") as scratch:
        for name, answers in play_each(trees, Path(scratch), processes):
            yield judge(name, answers, normal)


def main() -> int:
    parser = argparse.ArgumentParser(description="Drifts planted into the newest vLLM.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names; default: all")
    parser.add_argument("--draw", type=int, metavar="N", help="so many that a seed draws instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=PLAYS, default=list(PLAYS))
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts here")
    arguments = parser.parse_args()
    names = [
        name
        for name in DRIFTS
        if not arguments.names or any(part in name for part in arguments.names)
    ]
    if arguments.draw:
        names = draw(Sources(sources(NEWEST)), arguments.seed, arguments.draw)
    verdicts = []
    for verdict in play(names, arguments.processes, arguments.ways):
        verdicts.append(verdict)
        mark = "THROUGH" if verdict.got_through else "ok"
        ways = ", ".join(f"{way} {outcome}" for way, outcome in verdict.outcomes.items())
        print(f"{mark:8}{verdict.name}: {ways}", flush=True)
    through = [verdict for verdict in verdicts if verdict.got_through]
    print(f"{len(through)} of {len(verdicts)} drifts get through")
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(one) for one in verdicts], indent=2) + "\n")
    return 1 if through else 0


if __name__ == "__main__":
    sys.exit(main())
