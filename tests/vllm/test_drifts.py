"""Drifts planted into the newest release: each works, or is refused at bind and by doctor.

``drifts.py`` plays all of them, in minutes; this file plays one of each kind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

drifts: Any = import_module("drifts")
DRIFTS: Any = drifts.read_drifts()

HARMLESS = ("CachedRequestData requires another field", "NewRequestData has another order")
SAMPLE = (
    *HARMLESS,
    "CachedRequestData.new_block_ids by request",
    "Request.cache_salt renamed",
    "KVConnectorMetadata requires a method",
    "get_num_new_matched_tokens returns an object",
    "get_block_ids_with_load_errors renamed",
    "maybe_convert_block_hash renamed",
    "resolve_kv_cache_block_sizes returns an object",
    "SlidingWindowSpec requires another field",
    "_reuse_watchers renamed",
    "OffloadingWorker requires another method",
    "TransferResult.transfer_time renamed",
    "RequestOffloadingContext requires a policy",
)


@pytest.mark.newest
def test_every_drift_fits_the_newest_sources() -> None:
    files = drifts.Sources(drifts.sources(drifts.NEWEST))
    assert len(DRIFTS) >= 100
    for drift in DRIFTS.values():
        for path, text in drift.apply(files).items():
            compile(text, f"{drift.name}: {path}", "exec")


def play(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Play drifts; the verdicts by name."""
    # In a process that has not imported vLLM, because plays are forked off it.
    command = [sys.executable, str(Path(__file__).with_name("drifts.py")), *arguments]
    file = folder / "verdicts.json"
    done = subprocess.run(
        [*command, "--json", str(file)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {verdict["name"]: verdict for verdict in json.loads(file.read_text())}


@pytest.mark.newest
def test_no_drift_gets_through(tmp_path: Path) -> None:
    verdicts = play(tmp_path, *SAMPLE)
    works = {n for n, v in verdicts.items() if {*v["outcomes"].values()} == {"works", "healthy"}}
    assert works == {*HARMLESS}


@pytest.mark.newest
def test_a_drift_of_a_fact_alone_is_refused_in_one_line(tmp_path: Path) -> None:
    facts = [name for name, drift in DRIFTS.items() if drift.kind == "fact"]
    assert len(facts) == 12
    verdicts = play(tmp_path, *facts, "--ways", "connector", "doctor")
    assert {n: v["outcomes"]["doctor"] for n, v in verdicts.items()} == dict.fromkeys(
        facts, "refused"
    )
    for verdict in verdicts.values():
        assert "found" in verdict["messages"]["doctor"]
        assert "expected" in verdict["messages"]["doctor"]


@pytest.mark.newest
def test_check_ends_in_one_line_where_only_the_adapter_works(tmp_path: Path) -> None:
    names = [name for name, drift in DRIFTS.items() if drift.kind == "simulated"]
    verdicts = play(tmp_path, *names, "--ways", "connector", "check")
    assert names
    for name in names:
        assert verdicts[name]["outcomes"] == {"connector": "works", "check": "refused"}


def answer(
    stage: str = "done", kind: str = "", error: str = "", saw: object = 1
) -> dict[str, object]:
    return {"stage": stage, "kind": kind, "error": error, "saw": saw}


REFUSED = answer("bind", "UnsupportedEngineError", "the pool seam ...", None)
HEALTHY, ILL = answer(saw=[]), answer(saw=[["pool", "..."]])


@pytest.mark.parametrize(
    ("way", "doctor", "is_through"),
    [
        (answer(), HEALTHY, False),
        (answer(saw=2), HEALTHY, True),  # swallowed
        (REFUSED, ILL, False),
        (REFUSED, HEALTHY, True),  # doctor reports more health than there is
        (answer("bind", "TypeError", "not a refusal", None), ILL, True),
        (answer("bind", "UnsupportedEngineError", "two\nlines", None), ILL, True),
        (answer("run", "UnsupportedEngineError", "too late", None), ILL, True),
        (answer("not played", "TypeError", "of the harness", None), ILL, True),
        (answer("run", "AttributeError", "at a request", None), ILL, True),
    ],
)
def test_only_drifts_that_work_or_are_refused_do_not_get_through(
    way: dict[str, object], doctor: dict[str, object], is_through: bool
) -> None:
    normal = {"connector": answer(), "doctor": HEALTHY}
    verdict = drifts.judge("a drift", {"connector": way, "doctor": doctor}, normal)
    assert verdict.got_through is is_through
