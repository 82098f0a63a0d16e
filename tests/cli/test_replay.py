"""``kvview replay``: reports, bad rows, wrong connectors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvview import CPULoadStoreSpec
from kvview.cli.commands import cli
from kvview_reference.store_connector.planning.gpu_blocks import GPUBlocks

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT / 'examples' / 'host_cache.py'}:HostCacheConnector"
STORE = "kvview_reference.store_connector:StoreConnector"


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["replay", *map(str, args)])


def replay(tmp_path: Path, *args: str | Path) -> dict[str, Any]:
    report = tmp_path / "report.json"
    result = run(*args, "--json", report)
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(report.read_text())
    assert values["mismatches"] == values["holds_at_end"] == 0
    return values


def write_trace(path: Path, rows: list[object]) -> Path:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def mooncake_row(*hash_ids: int, **changes: object) -> dict[str, object]:
    row = {"timestamp": 0, "input_length": 512 * len(hash_ids), "output_length": 5}
    return {**row, "hash_ids": hash_ids, **changes}


@pytest.mark.parametrize(
    "options",
    [
        "--gpu-blocks 500",
        "--gpu-blocks 500 --option policy=arc --option cpu_blocks=700",
        f"--gpu-blocks 500 --connector {EXAMPLE} --option cpu_blocks=3000",
        "--gpu-blocks 300 --closed-loop 40 --block-bytes 64",
    ],
)
def test_generated_workload(tmp_path: Path, options: str) -> None:
    report = replay(tmp_path, "--requests", "150", *options.split())
    assert report["requests"] == 150
    assert report["loaded_blocks"] > 0
    assert report["bytes_verified"] > 0


def test_blocks_evicted_from_the_gpu_are_hit_on_the_cpu(tmp_path: Path) -> None:
    # One long prompt, then enough others to evict it, then the same prompt again.
    rows: list[object] = [mooncake_row(*range(n, n + 20)) for n in (0, 100, 200, 300, 400, 500, 0)]
    trace = tmp_path / "t.jsonl.gz"
    trace.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    report = replay(tmp_path, trace, "--gpu-blocks", "60", "--closed-loop", "1")
    assert report["blocks"] == 140
    assert report["gpu_hit_blocks"] == 0
    assert report["cpu_hit_blocks"] == 19  # the last block of a prompt is always computed
    assert report["loaded_blocks"] == 19
    assert report["bytes_verified"] == 19 * 1024


def test_bad_rows_end_the_command_or_are_counted(tmp_path: Path) -> None:
    bad = mooncake_row(7, 8, input_length="many")
    rows: list[object] = [mooncake_row(1, 2), bad, "not json", mooncake_row(3, 4)]
    trace = str(write_trace(tmp_path / "t.jsonl", rows))
    result = run(trace)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"kvview: {trace}:2: field 'input_length'")
    result = run(trace, "--skip-bad-rows", "--json", tmp_path / "r.json")
    assert result.exit_code == 0
    assert "t.jsonl: 2 of 4 requests read" in result.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["requests"], report["blocks"], report["malformed_rows"]) == (2, 4, 2)
    assert "t.jsonl:3" in report["lost"][1]


def test_a_tier_without_hits_is_explained(tmp_path: Path) -> None:
    rows: list[object] = [mooncake_row(*range(n, n + 9)) for n in (0, 20, 40, 0)]
    trace = write_trace(tmp_path / "t.jsonl", rows)
    arguments = ("--connector", EXAMPLE, "--gpu-blocks", "24", "--closed-loop", "1")
    assert "Nothing was hit on the CPU" in run(trace, "--option", "cpu_blocks=9", *arguments).stdout
    assert "Nothing was hit" not in run(trace, *arguments).stdout
    assert "stored no block" not in run(trace, *arguments).stdout


def test_a_gpu_that_keeps_every_block_is_explained(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [mooncake_row(*range(9))])
    stores_nothing = run(trace, "--connector", "examples/host_memory.py:HostMemoryConnector")
    assert "The connector stored no block." in stores_nothing.stdout


@pytest.mark.parametrize(
    ("target", "blocks", "wrong", "right"),  # a leak needs room, or it stops the run before its end
    [
        (STORE, 3000, "holds_at_end", "mismatches"),
        ("tests.mutants.connector:LoadsBackwards", 500, "mismatches", "holds_at_end"),
    ],
)
def test_a_wrong_connector_has_exit_code_1(
    target: str,
    blocks: int,
    wrong: str,
    right: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = GPUBlocks.release  # of StoreConnector, which now keeps a hold at each release
    monkeypatch.setattr(GPUBlocks, "release", lambda gpu, blocks: release(gpu, blocks[1:]))
    path = tmp_path / "r.json"
    size = ("--requests", "300", "--gpu-blocks", str(blocks))
    result = run(*size, "--connector", target, "--json", path)
    assert result.exit_code == 1, result.output
    report = json.loads(path.read_text())
    assert report[wrong] > 0
    assert report[right] == 0


def test_media_and_failures_are_the_connectors_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CPULoadStoreSpec, "medium", "DISK")
    rows: list[object] = [mooncake_row(*range(n, n + 9)) for n in (0, 20, 40, 0)]
    result = run(
        *(write_trace(tmp_path / "t.jsonl", rows), "--closed-loop", "1", "--gpu-blocks", "24"),
        *("--connector", "tests.testing.unrun_code:CannotLoad", "--json", tmp_path / "r.json"),
    )
    assert result.exit_code == 0  # a reported failure costs time and breaks no law
    assert "hit on the DISK tier" in result.stdout
    assert "1 transfers failed" in result.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["media"], report["failed_transfers"]) == (["DISK"], 1)
    assert report["first_failure"].endswith("No such file or directory: '/nonexistent/page'")
