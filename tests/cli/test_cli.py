"""The command line as a user meets it: reports, exit codes, one-line errors."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvview.cli.commands import cli
from tests.traces import NAMES, trace_file

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT / 'examples' / 'host_cache.py'}:HostCacheConnector"
MODEL = {"layers": 2, "kv_heads": 2, "head_size": 8}
REPORT_NAMES = {
    "requests",
    "blocks",
    "gpu_hit_blocks",
    "cpu_hit_blocks",
    "offloaded_blocks",
    "loaded_blocks",
    "bytes_verified",
    "mismatches",
    "holds_at_end",
    "seconds",
    "blocks_per_s",
}


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def replay(tmp_path: Path, *args: str | Path) -> dict[str, Any]:
    report = tmp_path / "report.json"
    result = run("replay", *args, "--json", report)
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(report.read_text())
    assert values.keys() >= REPORT_NAMES
    assert values["mismatches"] == values["holds_at_end"] == 0
    return values


def write_trace(path: Path, rows: list[object]) -> Path:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def mooncake_row(*hash_ids: int, output_length: int = 5) -> dict[str, object]:
    return {
        "timestamp": 0,
        "input_length": 512 * len(hash_ids),
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


@pytest.mark.parametrize(
    "options",
    [
        ("--gpu-blocks", "500"),
        ("--gpu-blocks", "500", "--policy", "arc", "--cpu-blocks", "700"),
        ("--gpu-blocks", "900", "--groups", "full,window:4096,chunked:8192@2,mamba@2"),
        ("--gpu-blocks", "500", "--connector", EXAMPLE, "--cpu-blocks", "3000"),
        ("--gpu-blocks", "300", "--concurrency", "40", "--block-bytes", "64"),
    ],
)
def test_generated_workload(tmp_path: Path, options: tuple[str, ...]) -> None:
    report = replay(tmp_path, "--requests", "300", *options)
    assert report["requests"] == 300
    assert report["loaded_blocks"] > 0
    assert report["bytes_verified"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_slice_of_a_real_trace_or_one_that_is_like_it(tmp_path: Path, name: str) -> None:
    path = trace_file(name).path
    report = replay(tmp_path, path, "--requests", "100", "--gpu-blocks", "8000")
    assert report["requests"] == 100
    assert report["gpu_hit_blocks"] > 0


def test_blocks_that_left_the_gpu_are_hit_on_the_cpu(tmp_path: Path) -> None:
    # One long prompt, then enough others to evict it, then the same prompt again.
    rows: list[object] = [mooncake_row(*range(20))]
    rows += [mooncake_row(*range(100 * n, 100 * n + 20)) for n in range(1, 6)]
    rows += [mooncake_row(*range(20))]
    trace = write_trace(tmp_path / "t.jsonl", rows)
    report = replay(tmp_path, trace, "--gpu-blocks", "60", "--concurrency", "1")
    assert report["blocks"] == 140
    assert report["gpu_hit_blocks"] == 0
    assert report["cpu_hit_blocks"] == 19  # the last block of a prompt is always computed
    assert report["loaded_blocks"] == 19
    assert report["bytes_verified"] == 19 * 1024


def test_malformed_row_is_named_and_nothing_else_is_lost(tmp_path: Path) -> None:
    bad = mooncake_row(7, 8) | {"input_length": "many"}
    trace = write_trace(tmp_path / "t.jsonl", [mooncake_row(1, 2), bad, mooncake_row(3, 4)])
    result = run("replay", trace, "--json", "-")
    assert result.exit_code == 0
    assert f"{trace}:2: field 'input_length'" in result.stderr
    report = json.loads(result.stdout[result.stdout.index("{") :])
    assert (report["requests"], report["blocks"], report["malformed_rows"]) == (2, 4, 1)


def test_strict_ends_the_run_at_damaged_input(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [mooncake_row(1, 2), "not json", mooncake_row(3)])
    assert run("replay", trace, "--strict").exit_code == 2
    result = run("replay", trace, "--json", tmp_path / "r.json")
    assert result.exit_code == 0
    assert result.stderr.splitlines()[-1] == "kvview: lost: 1 of t.jsonl could not be read"
    assert "t.jsonl:2" in json.loads((tmp_path / "r.json").read_text())["lost"][0]


def test_all_that_follows_a_cut_is_lost(tmp_path: Path) -> None:
    rows = [json.dumps(mooncake_row(place, place + 99)) + "\n" for place in range(40)]
    packed = gzip.compress("".join(rows).encode())
    (tmp_path / "t.gz").write_bytes(packed[: len(packed) // 2])
    result = run("replay", tmp_path / "t.gz", "--json", tmp_path / "r.json")
    assert result.exit_code == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert 0 < report["requests"] < 39
    assert report["cut"] == [f"all that follows line {report['requests']} of t.gz"]
    last = result.stderr.splitlines()[-1]
    assert last == f"kvview: lost: 1 of t.gz could not be read, nor {report['cut'][0]}"


def test_why_nothing_was_hit(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "t.jsonl", [mooncake_row(*range(n, n + 9)) for n in (0, 20, 40, 0)]
    )
    arguments = ("--connector", EXAMPLE, "--gpu-blocks", "24", "--closed-loop", "1")
    few = run("replay", trace, "--cpu-blocks", "9", *arguments).stdout
    assert "Nothing was hit on the CPU tier, though" in few
    assert "Nothing was hit" not in run("replay", trace, *arguments).stdout


DISK = f"""
from dataclasses import replace
from kvview import CPULoadStoreSpec, Connector, StepPlan
from kvview.targets import load_connector

Host = load_connector({EXAMPLE!r})

class Disk(CPULoadStoreSpec):
    medium = "DISK"

class Loses(Host):
    def make_scheduler(self):
        half = super().make_scheduler()
        plan_step = half.plan_step
        def on_disk(step):
            plan = plan_step(step)
            return StepPlan(
                [replace(job, src=Disk(job.src.block_ids)) for job in plan.loads],
                [replace(job, dst=Disk(job.dst.block_ids)) for job in plan.stores],
            )
        half.plan_step = on_disk
        return half

    def make_worker(self):
        half = super().make_worker()
        start_plan, get_finished, loads = half.start_plan, half.get_finished, set()
        def start(plan):
            loads.update(job.job_id for job in plan.loads)
            start_plan(plan)
        def finished():
            return [
                replace(result, success=False, error="row 3 is gone")
                if result.job_id in loads else result
                for result in get_finished()
            ]
        half.start_plan, half.get_finished = start, finished
        return half
"""


def test_the_medium_and_the_failures_are_the_connectors_own(tmp_path: Path) -> None:
    (tmp_path / "disk.py").write_text(DISK)
    trace = write_trace(
        tmp_path / "t.jsonl", [mooncake_row(*range(n, n + 9)) for n in (0, 20, 40, 0)]
    )
    result = run(
        *("replay", trace, "--connector", f"{tmp_path / 'disk.py'}:Loses", "--closed-loop", "1"),
        *("--gpu-blocks", "24", "--json", tmp_path / "r.json"),
    )
    assert result.exit_code == 0  # an honest failure costs time and breaks no law
    assert "hit on the DISK tier" in result.stdout
    assert "1 transfers failed. A replay makes none fail" in result.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["media"], report["failed_transfers"]) == (["DISK"], 1)
    assert report["first_failure"].endswith("row 3 is gone")


def test_time_as_it_was_and_what_it_rests_on(tmp_path: Path) -> None:
    rows: list[object] = [mooncake_row(*range(9)) | {"timestamp": 1000 * at} for at in (5, 7, 65)]
    trace = write_trace(tmp_path / "t.jsonl", rows)
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    report = replay(tmp_path, trace, "--speed", "2", "--model", tmp_path / "model.json")
    assert (report["play"], report["closed_loop"], report["trace_seconds"]) == ("time", None, 30.0)
    assert report["time"]["token_bytes"] == 128
    text = run("replay", trace, "--prefill-rate", "5000").stdout
    assert "Time as it was: 5,000 prompt tokens/s, 0.02 s a generated token" in text
    assert "Requests came for 60 s and were done after 60 s." in text
    result = run("replay", trace, "--model", tmp_path / "model.json", "--token-bytes", "8")
    assert result.exit_code == 2
    assert "cannot both be given" in result.stderr
    slow = run("replay", trace, "--prefill-rate", "10").stdout
    assert "One such engine is too slow for this trace" in slow
    looped = replay(tmp_path, trace, "--closed-loop", "1")
    assert (looped["play"], looped["closed_loop"], looped["time"]) == ("closed-loop", 1, None)
    generated = replay(tmp_path, "--requests", "20")
    assert generated["closed_loop"] == 16
    assert replay(tmp_path, "--requests", "20", "--speed", "1")["play"] == "time"


def test_a_trace_without_timestamps_is_played_closed_loop(tmp_path: Path) -> None:
    plain = mooncake_row(1, 2)
    del plain["timestamp"]
    trace = write_trace(tmp_path / "t.jsonl", [plain, plain])
    result = run("replay", trace, "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert result.stderr == (
        "kvview: t.jsonl has no timestamps: played closed-loop, 16 requests at once\n"
    )
    assert json.loads((tmp_path / "r.json").read_text())["closed_loop"] == 16
    result = run("replay", trace, "--speed", "2")
    assert result.exit_code == 2
    assert "has no timestamps" in result.stderr
    assert run("replay", trace, "--closed-loop", "2").stderr == ""
    write_trace(trace, [plain, mooncake_row(1, 2), plain])
    result = run("replay", trace)
    assert ":2: field 'timestamp': the first row has none" in result.stderr
    assert run("replay", trace, "--strict").exit_code == 2


def test_a_request_that_cannot_fit_is_passed_over(tmp_path: Path) -> None:
    rows: list[object] = [mooncake_row(1), mooncake_row(*range(90)), mooncake_row(1, 2)]
    trace = write_trace(tmp_path / "t.jsonl", rows)
    for mode in ([], ["--closed-loop", "1"]):
        report = replay(tmp_path, trace, "--gpu-blocks", "20", *mode)
        assert (report["requests"], report["requests_too_large"], report["blocks"]) == (2, 1, 3)


def test_gzip_and_json_to_stdout(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl.gz"
    trace.write_bytes(gzip.compress(json.dumps(mooncake_row(1, 2, 3)).encode()))
    result = run("replay", trace, "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout[result.stdout.index("{") :])["blocks"] == 3


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["no/such/trace.jsonl"], "no/such/trace.jsonl"),
        ([str(ROOT / "kvview")], "no file in it ends in"),
        (["--connector", "nonsense"], "expected 'path/to/file.py:Name'"),
        (["--connector", "no_such_module:Connector"], "No module named 'no_such_module'"),
        (["--connector", "no_such_file.py:Connector"], "there is no file"),
        (["--connector", "kvview_reference.connector:Nothing"], "LazyOffloadConnector"),
        (["--connector", "json:loads"], "is a function, not a subclass"),
        (["--option", "cpu_blokcs=5"], "cpu_blokcs"),
        (["--option", "cpu_blocks"], "KEY=VALUE"),
        (["--policy", "mru"], "lru"),
        (["--cpu-blocks", "-1"], "cpu_blocks"),
        (["--cpu-blocks", "1000000000000"], "host"),
        (["--gpu-blocks", "1000000000000"], "GPU blocks"),
        (["--gpu-blocks", "1"], "num_blocks"),
        (["--gpu-blocks", "-5"], "num_blocks"),
        (["--gpu-blocks", "2"], "use more GPU blocks"),
        (["--closed-loop", "4", "--speed", "2"], "--speed is for time as it was"),
        (["--closed-loop", "4", "--model", "x"], "--model is for time as it was"),
        (["--speed", "0"], "--speed must be above 0"),
        (["--prefill-rate", "nan"], "--prefill-rate must be above 0"),
        (["--max-running", "0"], "--max-running must be above 0"),
        (["--model", "no/such.json"], "No such file"),
        (["--block-bytes", "12"], "multiple of 8"),
        (["--closed-loop", "0"], "closed_loop"),
        (["--requests", "0"], "--requests"),
        (["--seed", "-1"], "seed"),
        (["--groups", "full,windov:4096"], "window:TOKENS"),
        (["--groups", "window:0"], "sliding_window"),
        (["--json", "no/such/folder/report.json"], "existing folder"),
    ],
)
def test_what_cannot_run_is_one_clear_line_and_exit_code_2(args: list[str], part: str) -> None:
    result = run("replay", "--requests", "50", *args)
    assert result.exit_code == 2, result.output
    assert part in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output


def test_connector_that_does_not_import_says_why(tmp_path: Path) -> None:
    target = tmp_path / "broken.py"
    target.write_text("import kvview\nkvview.no_such_name\n")
    result = run("replay", "--connector", f"{target}:Connector")
    assert result.exit_code == 2
    assert "AttributeError" in result.stderr
    assert "no_such_name" in result.stderr


LEAKY = """
from kvview_reference.connector import OffloadConnector, OffloadScheduler

class Scheduler(OffloadScheduler):
    def _free(self, block_ids):
        super()._free(block_ids[1:])

class Leaky(OffloadConnector):
    def make_scheduler(self):
        return Scheduler(self.config, self.options)
"""

CORRUPT = """
from kvview_reference.connector import OffloadConnector, OffloadWorker

class Worker(OffloadWorker):
    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        self.gpu = kv_caches.tensors[0].tensor

    def start_plan(self, plan):
        super().start_plan(plan)
        for job in plan.loads:
            self.wait([job.job_id])
            self.gpu[job.dst.block_ids[0], 3] += 1

class Corrupt(OffloadConnector):
    def make_worker(self):
        return Worker(self.options)
"""


@pytest.mark.parametrize(
    ("source", "name", "wrong", "right"),
    [
        (LEAKY, "Leaky", "holds_at_end", "mismatches"),
        (CORRUPT, "Corrupt", "mismatches", "holds_at_end"),
    ],
)
def test_a_wrong_connector_is_seen_and_gives_exit_code_1(
    tmp_path: Path, source: str, name: str, wrong: str, right: str
) -> None:
    target = tmp_path / "wrong.py"
    target.write_text(source)
    report_file = tmp_path / "report.json"
    # Enough room that a leak does not stop the run before its end.
    result = run(
        *("replay", "--requests", "300", "--gpu-blocks", "3000"),
        *("--connector", f"{target}:{name}", "--json", report_file),
    )
    assert result.exit_code == 1, result.output
    report = json.loads(report_file.read_text())
    assert report[wrong] > 0
    assert report[right] == 0


def test_installed_command() -> None:
    command = Path(sys.executable).parent / "kvview"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kvview, version ")


def test_without_vllm_its_engine_is_one_line_and_exit_2() -> None:
    command = [sys.executable, "-c", "from kvview.cli import main; main()"]
    done = subprocess.run(
        [*command, "check", EXAMPLE, "--engine", "vllm"], capture_output=True, text=True, timeout=60
    )
    if "No module named 'vllm'" not in done.stderr:
        pytest.skip("there is a vLLM")
    assert done.returncode == 2
    assert done.stderr.startswith("kvview: ")
    assert done.stderr.count("\n") == 1
    assert "Install vLLM" in done.stderr
    assert not done.stdout
