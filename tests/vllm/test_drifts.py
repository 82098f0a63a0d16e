"""Drifts planted into the newest release: each works, or is refused at bind and by doctor.

``drifts.py`` plays all of them, in minutes; here stands one of each kind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip(  # a submodule: this very folder is named vllm
    "vllm.version",
    reason="needs vLLM's Python sources: tests/vllm/sources.py",
    exc_type=ImportError,
)

drifts: Any = import_module("drifts")
facts: Any = import_module("drift_facts")

SAMPLE = (
    "CachedRequestData.new_block_ids by request",
    "CachedRequestData requires a field more",
    "Request.cache_salt renamed",
    "KVConnectorMetadata requires a method",
    "get_num_new_matched_tokens answers an object",
    "get_block_ids_with_load_errors renamed",
    "maybe_convert_block_hash renamed",
    "resolve_kv_cache_block_sizes answers an object",
    "_reuse_watchers renamed",
    "OffloadingWorker requires a method more",
    "TransferResult.transfer_time renamed",
    "RequestOffloadingContext requires a policy",
)
HARMLESS = ("CachedRequestData requires a field more", "NewRequestData in another order")

newest = pytest.mark.skipif(
    vllm.__version__ != drifts.NEWEST, reason="drifts are planted into the newest release"
)


@newest
def test_every_drift_fits_the_newest_sources() -> None:
    files = drifts.Sources(drifts.sources(drifts.NEWEST))
    assert len(drifts.DRIFTS) >= 100
    for name, drift in drifts.DRIFTS.items():
        for path, text in drift.apply(files).items():
            compile(text, f"{name}: {path}", "exec")


@newest
def test_no_drift_gets_through(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.json"
    script = Path(__file__).with_name("drifts.py")
    command = [sys.executable, str(script), *SAMPLE, HARMLESS[1], "--json", str(file)]
    # In a process that has imported no vLLM: those that play are forked off it.
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    works = [
        verdict["name"]
        for verdict in json.loads(file.read_text())
        if set(verdict["outcomes"].values()) == {"works", "healthy"}
    ]
    assert works == list(HARMLESS)


@newest
def test_a_drift_that_changes_a_fact_alone_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.json"
    names = list(facts.FACTS)
    script = Path(__file__).with_name("drifts.py")
    ways = ("--ways", "connector", "doctor", "--json", str(file))
    done = subprocess.run(
        [sys.executable, str(script), *names, *ways], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {verdict["name"]: verdict for verdict in json.loads(file.read_text())}
    assert {name: verdict["outcomes"]["doctor"] for name, verdict in verdicts.items()} == (
        dict.fromkeys(facts.FACTS, "refused")
    )
    for verdict in verdicts.values():
        assert "found" in verdict["messages"]["doctor"]
        assert "expected" in verdict["messages"]["doctor"]


@newest
def test_check_ends_in_one_line_where_only_the_adapter_works(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.json"
    script = Path(__file__).with_name("drifts.py")
    ways = ("--ways", "connector", "check", "--json", str(file))
    done = subprocess.run(
        [sys.executable, str(script), *facts.ONLY_SIMULATED, *ways],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [verdict["outcomes"] for verdict in json.loads(file.read_text())]
    assert outcomes == [{"connector": "works", "check": "refused"}] * len(facts.ONLY_SIMULATED)


def answer(
    stage: str = "done", kind: str = "", error: str = "", saw: object = 1
) -> dict[str, object]:
    return {"stage": stage, "kind": kind, "error": error, "saw": saw}


REFUSED = answer("bind", "UnsupportedEngineError", "the pool seam ...", None)
HEALTHY, ILL = answer(saw=[]), answer(saw=[["pool", "..."]])


@pytest.mark.parametrize(
    ("way", "doctor", "through"),
    [
        (answer(), HEALTHY, False),
        (answer(saw=2), HEALTHY, True),  # swallowed
        (REFUSED, ILL, False),
        (REFUSED, HEALTHY, True),  # doctor is healthier than the engine
        (answer("bind", "TypeError", "no one line of ours", None), ILL, True),
        (answer("bind", "UnsupportedEngineError", "two\nlines", None), ILL, True),
        (answer("run", "UnsupportedEngineError", "too late", None), ILL, True),
        (answer("not played", "TypeError", "of the harness", None), ILL, True),
        (answer("run", "AttributeError", "at a request", None), ILL, True),
    ],
)
def test_what_gets_through(
    way: dict[str, object], doctor: dict[str, object], through: bool
) -> None:
    normal = {"connector": answer(), "doctor": HEALTHY}
    verdict = drifts.judge("a drift", {"connector": way, "doctor": doctor}, normal)
    assert verdict.got_through is through
