"""Plays on drifted sources of vLLM, each in a process of its own (``drifts.py``).

A *play* is one way to use the adapter: a connector under the real scheduler, the offloading spec
under vLLM's OffloadingConnector, a translated manager of vLLM's, ``kvview check`` and ``kvview
doctor``. It reports its stage, its error and the values that it saw. These are compared with the
same play on the unchanged sources, so that a swallowed drift shows.

Third-party packages are imported once, in the process that forks.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar

Answer = dict[str, Any]
"""``stage`` (``bind``, ``run``, ``done``), ``error``, ``kind`` of the error, ``saw``."""

_HERE = Path(__file__).parent
_OURS = ("vllm", "kvview", "kvview_vllm", "kvview_reference", "tests", "engine", "drift_plays")
_VLLM = ("vllm.config", "vllm.v1.core.sched.async_scheduler", "vllm.v1.outputs", "vllm.v1.request")
_STAND_INS = ("tests/vllm/engine.py", "kvview_vllm/simulation/")
HARNESS = "kvview-harness.json"
"""Name of a file in drifted sources: the edits of the harness."""

_HARNESS = {
    "engine": _HERE / "engine.py",
    "kvview_vllm.simulation.scheduler": _HERE.parents[1]
    / "adapters/kvview_vllm/simulation/scheduler.py",
}
_TOKENS = range(10, 10 + 6 * 16 + 4)
_OTHERS = range(200, 200 + 6 * 16 + 4)


# --- the plays ---


def _play_connector(bound: Callable[[], None]) -> Any:
    import engine as lane  # type: ignore[import-not-found]

    target = f"{_HERE / 'drift_spy.py'}:"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def build(kind: str, **options: Any) -> Any:
            return _record_events(
                lane.Engine(folder, lane.connector_config(target + kind), **options)
            )

        engines = [
            build("SpyConnector"),
            build("SpyConnector", windows=(None, lane.WINDOW)),
            build("FailingSpy"),
            build("FailingSpy", windows=(None, lane.WINDOW)),
            build("SpyConnector", num_blocks=16),
        ]
        bound()
        saw = [_serve_twice(engine) for engine in engines[:4]]
        crowded = engines[4]
        for number, first in enumerate((10, 200)):
            crowded.add(f"r{number}", range(first, first + 100), max_tokens=24)
        crowded.run(200)
        saw.append(_saw(crowded))
        return saw


def _serve_twice(engine: Any) -> Any:
    engine.add("first", _TOKENS)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.scribble()
    engine.add("again", _TOKENS)
    engine.run()
    engine.add("gone", _OTHERS)
    engine.step()
    engine.abort("gone")
    engine.run()
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    return _saw(engine)


def _saw(engine: Any) -> Any:
    side = engine.scheduler.connector._scheduler_side
    return [side.half.saw, sorted(engine.hits.items()), engine.num_free_blocks(), engine.published]


def _record_events(engine: Any) -> Any:
    """Record the events that the engine takes, as a subscriber reads them."""
    take, engine.published = engine.scheduler.connector.take_events, []

    def taken() -> Any:
        events = list(take())
        for event in events:
            fields = [type(event).__name__, list(map(str, event.block_hashes)), event.medium]
            size = event.block_size if fields[0] == "BlockStored" else None
            engine.published.append([*fields, size, event.group_idx])
        return events

    engine.scheduler.connector.take_events = taken
    return engine


def _play_spec(bound: Callable[[], None]) -> Any:
    import engine as lane
    from kvview_vllm.releases import installed

    _ = installed().connector  # the stand-in of a worker reads it at its first step
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVViewOffloadingSpec",
            "spec_module_path": "kvview_vllm.offloading_spec",
            "kvview": {"num_blocks": 12, "manager_options": {"enable_events": True}},
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        engine = _record_events(lane.Engine(Path(folder), config))
        bound()
        for number, tokens in enumerate((_TOKENS, _OTHERS, _TOKENS, range(400, 500))):
            engine.add(f"r{number}", tokens)
            engine.run()
            for _ in range(4):
                engine.step()
            assert engine.scheduler.reset_prefix_cache()
            engine.scribble()
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        return [sorted(engine.hits.items()), engine.published]


def _play_manager(bound: Callable[[], None]) -> Any:
    from kvview import ReqContext, make_offload_key
    from kvview_vllm.offloading import TranslatedManager
    from kvview_vllm.offloading.offloading_canary import check_vllm_managers
    from kvview_vllm.releases.calls import make_cpu_manager

    check_vllm_managers()
    manager = TranslatedManager(make_cpu_manager(2, enable_events=True))
    bound()
    context = ReqContext(req_id="r")
    saw: list[Any] = []
    manager.on_new_request(context)
    for name in (b"a", b"b", b"c"):
        keys = [make_offload_key(name, 0)]
        output = manager.prepare_store(keys, context)
        assert output is not None
        saw.append([len(output.keys_to_store), len(output.evicted_keys), repr(output.store_spec)])
        saw.append(manager.lookup(keys[0], context).name)
        manager.complete_store(keys, context)
        saw.append(manager.lookup(keys[0], context).name)
        saw.append(repr(manager.prepare_load(keys, context)))
        manager.complete_load(keys, context)
        manager.touch(keys, context)
        manager.on_schedule_end()
        saw.append([[len(e.keys), e.medium, e.removed] for e in manager.take_events()])
        saw.append(manager.has_pending_work())
    manager.on_request_finished(context)
    manager.reset()
    manager.shutdown()
    return saw


def _play_check(bound: Callable[[], None]) -> Any:
    """Run ``kvview check --engine vllm``: it gives a verdict, or one line (VSIM-7)."""
    if _Harness in sys.meta_path:
        sys.meta_path.remove(_Harness)
    from kvview.targets import load_connector
    from kvview.testing.connector import check_connector
    from kvview_vllm.simulation import VLLMEngines

    # Runs start worker halves in processes, and a process of a pool may have no children.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    target = load_connector(f"{_HERE.parents[1] / 'examples' / 'host_cache.py'}:HostCacheConnector")
    report = check_connector(target, seeds=4, engines=VLLMEngines(), max_shrink_runs=0)
    return [str(failure) for failure in report.failures]


def _play_doctor(bound: Callable[[], None]) -> Any:
    from kvview_vllm.doctor import diagnose

    found = diagnose()
    bound()
    return [[seam.seam, seam.detail] for seam in found.seams if not seam.fits]


PLAYS: Mapping[str, Callable[[Callable[[], None]], Any]] = {
    "connector": _play_connector,
    "spec": _play_spec,
    "manager": _play_manager,
    "check": _play_check,
    "doctor": _play_doctor,
}


# --- processes ---


def _answer_of(play: Callable[[Callable[[], None]], Any]) -> Answer:
    stage = "bind"

    def bound() -> None:
        nonlocal stage
        stage = "run"

    try:
        saw = play(bound)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        while frames[-1].filename.endswith("releases/calls.py"):
            frames.pop()  # it calls as the release requires: find its caller
        where = frames[-1]
        message = f"{error} ({Path(where.filename).name}:{where.lineno})"
        if type(error).__name__ == "UnsupportedEngineError":
            message = str(error)
        elif any(part in where.filename for part in _STAND_INS):
            stage = "not played"  # only the stand-in of the model reads it
        return {"stage": stage, "kind": type(error).__name__, "error": message, "saw": None}
    return {"stage": "done", "kind": "", "error": "", "saw": json.loads(json.dumps(saw))}


def _in_child(work: Callable[[], Any]) -> Any:
    """Return the result of some work, done in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


class _Harness(SourceFileLoader):
    """Imports the harness with the names of the drifted sources."""

    changes: ClassVar[Mapping[str, str]] = {}

    def get_code(self, fullname: str) -> Any:
        text = Path(self.path).read_text()
        for pattern, new in self.changes.items():
            text = re.sub(pattern, new, text)
        return compile(text, self.path, "exec")

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> Any:
        if (file := _HARNESS.get(name)) is None:
            return None
        return spec_from_file_location(name, file, loader=cls(name, str(file)))


def _play_all(path: Path) -> dict[str, Answer]:
    """Play all ways on the sources in a folder; vLLM is imported once for them."""
    if (path / HARNESS).exists() and (changes := json.loads((path / HARNESS).read_text())):
        _Harness.changes = changes
        sys.meta_path.insert(0, _Harness)
    sys.path.insert(0, str(path))
    sys.path.insert(0, str(_HERE))
    try:
        for module in _VLLM:
            importlib.import_module(module)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"vllm": {"stage": "import", "kind": "BrokenDrift", "error": text, "saw": None}}
    answers = {name: _in_child(partial(_answer_of, PLAYS[name])) for name in _ways}
    died = {"stage": "run", "kind": "Died", "error": "the process died", "saw": None}
    return {name: answer or died for name, answer in answers.items()}


def prepare(sources: Path, ways: Sequence[str]) -> dict[str, Answer]:
    """Make this process one that forks plays.

    Args:
        sources: Of vLLM, unchanged.
        ways: Names of plays.

    Returns:
        The answer of every play there.
    """
    _ways[:] = ways
    os.environ.update(PYTHONHASHSEED="0", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    warnings.simplefilter("ignore")

    def first() -> tuple[dict[str, Answer], list[str]]:
        answers = _play_all(sources)
        import engine  # noqa: F401

        importlib.import_module("kvview_vllm.connector")
        names = [name for name in sys.modules if name.partition(".")[0] not in _OURS]
        return answers, names

    answers, names = _in_child(first)
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            continue  # its parent makes it at run time
    found: dict[str, Answer] = answers
    return found


def play_each(
    trees: Sequence[tuple[str, Callable[[Path], None]]], scratch: Path, processes: int
) -> Iterator[tuple[str, dict[str, Answer]]]:
    """Play on trees of sources, some at a time.

    Args:
        trees: Names, and functions that write a tree into a new folder.
        scratch: A folder for trees and compiled files.
        processes: The number that run at a time.
    """
    sys.pycache_prefix = str(scratch / "compiled")
    context = multiprocessing.get_context("fork")
    _trees.update(trees)
    with context.Pool(processes, maxtasksperchild=1) as pool:
        tasks = [(name, str(scratch), processes) for name, _ in trees]
        yield from pool.imap(_play_tree, tasks, chunksize=1)


_ways: list[str] = []
_trees: dict[str, Callable[[Path], None]] = {}


def _play_tree(task: tuple[str, str, int]) -> tuple[str, dict[str, Answer]]:
    name, scratch, slots = task
    # The same paths again and again, so that their compiled files are found again.
    for slot in range(slots):
        lock = os.open(Path(scratch, f"slot{slot}.lock"), os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        folder = Path(scratch, f"slot{slot}")
        _trees[name](folder)
        return name, _play_all(folder)
    raise AssertionError("more processes than slots")
