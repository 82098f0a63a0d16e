"""Plants drifts into the newest release's sources, and reports the drifts that get through.

    python tests/vllm/drifts.py [NAME ...] [--processes 2]

Each drift of ``drifts.toml`` is planted into a copy of the sources (links, except for the files
that change). There ``kvview doctor`` runs the checks that also run when a connector is bound. It
must refuse the drift in one line, or, if it finds nothing, the example connector must serve with
the same hits and right bytes as on the unchanged sources. Every other drift got *through*.

Third-party packages are imported once, in the process that forks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drift_edits import Drift, Files, Sources, read_drifts  # type: ignore[import-not-found]

from kvview_vllm.releases.compat.versions import RELEASES
from kvview_vllm.releases.sources import sources

NEWEST = RELEASES[-1]
REFUSED, WORKS = "refused", "works"

_ROOT = Path(__file__).parents[2]
_OURS = ("vllm", "kvview", "kvview_vllm", "kvview_reference", "tests")


def write_tree(whole: Path, folder: Path, changed: Files) -> None:
    """Write sources with some files changed: links, except for these files and their folders."""
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


def serve() -> Any:
    """Serve requests with the example connector, which is checked by bytes; return its hits."""
    from kvview import FullAttention, SlidingWindow
    from tests.vllm.server import Server

    server = Server(groups=(FullAttention(16), SlidingWindow(16, 32)))
    for name in ("first", "again"):
        server.ask(name)
        server.run()
        server.ask("gone", family=2)
        server.step()
        server.abort("gone")
        server.run()
        assert server.reset()
        server.evict()
    return [sorted(server.hits.items()), server.num_free_blocks()]


def outcome_on(folder: Path) -> tuple[str, Any]:
    """Return whether the sources in a folder are refused, and the reasons or the hits."""
    sys.path[:0] = [str(folder), str(_ROOT)]
    importlib.import_module("vllm.v1.core.sched.async_scheduler")
    from kvview_vllm.doctor import diagnose

    found = diagnose()
    if reasons := [f"{seam.seam}: {seam.detail}" for seam in found.seams if not seam.fits]:
        lines = [reason for reason in reasons if "\n" in reason or "; expected " not in reason]
        return ("refused in other words", lines) if lines else (REFUSED, reasons)
    try:
        return WORKS, serve()
    except Exception as error:
        return "healthy, and then fails", [f"{type(error).__name__}: {error}"]


def _in_child(work: Callable[[], Any]) -> Any:
    """Return the result of some work, done in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(writer, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else ["died", []]


def _prepare(folder: Path) -> Any:
    """Import the third-party packages; return the hits on the unchanged sources."""
    os.environ.update(PYTHONHASHSEED="0", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    warnings.simplefilter("ignore")

    def first() -> Any:
        outcome = outcome_on(folder)
        return *outcome, [name for name in sys.modules if name.partition(".")[0] not in _OURS]

    outcome, hits, names = _in_child(first)
    assert outcome == WORKS, hits
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            continue  # its parent makes it at run time
    return hits


_planted: dict[str, Files] = {}  # for the processes of the pool, which are forks


def _play(name: str, whole: Path, scratch: str) -> tuple[str, Any]:
    # The same path again and again, so that its compiled files are found again.
    folder = Path(scratch, str(os.getpid()))
    shutil.rmtree(folder, ignore_errors=True)
    write_tree(whole, folder, _planted[name])
    found: tuple[str, Any] = tuple(_in_child(partial(outcome_on, folder)))
    return found


def play(drifts: Mapping[str, Drift], processes: int = 2) -> Iterator[tuple[str, str, str]]:
    """Plant drifts and yield, for each, its name, its outcome and the reasons."""
    files = Sources(sources(NEWEST))
    files.all()
    normal = _prepare(files.folder)
    _planted.update({name: drift.apply(files) for name, drift in drifts.items()})
    with tempfile.TemporaryDirectory(prefix="kvview-drifts-") as scratch:
        sys.pycache_prefix = f"{scratch}/compiled"
        work = partial(_play, whole=files.folder, scratch=scratch)
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            for name, (outcome, found) in zip(drifts, pool.imap(work, drifts), strict=True):
                if outcome == WORKS and found != normal:
                    yield name, "swallowed", f"{found} instead of {normal}"
                else:
                    yield name, outcome, "" if outcome == WORKS else "; ".join(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Drifts planted into the newest vLLM.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names; default: all")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    given = parser.parse_args(arguments)
    names = given.names or [""]
    chosen = {n: drift for n, drift in read_drifts().items() if any(part in n for part in names)}
    through = 0
    for name, outcome, reasons in play(chosen, given.processes):
        through += outcome != (WORKS if chosen[name].works else REFUSED)
        print(f"{outcome:10}{name}: {reasons}", flush=True)
    print(f"{through} of {len(chosen)} drifts get through")
    return 1 if through else 0


if __name__ == "__main__":
    sys.exit(main())
