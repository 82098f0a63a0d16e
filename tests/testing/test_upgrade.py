"""One connector in many releases: real processes of the real kit, on the reference engine.

A release of the tests is an empty folder: the one that is called "reference" is what the
report names, so it is a release that ran; any other one did not run where it should have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvview import ConfigError
from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview_vllm.releases import upgrade
from kvview_vllm.releases.sources import VLLMReleases
from kvview_vllm.releases.upgrade import (
    ReleaseResult,
    UpgradeReport,
    Verdict,
    check_releases,
    judge,
)

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT}/examples/host_cache.py:HostCacheConnector"


class Folders(VLLMReleases):
    """Releases that are folders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def resolve(self, names: Sequence[str]) -> list[str]:
        return list(names)

    def fetch(self, release: str, on_progress: Callable[[str], None]) -> Path:
        if release == "unheard-of":
            raise ConfigError("no such release")
        return self.folder

    def environment(self) -> Mapping[str, str]:
        return {"SET_FOR_ALL": "1"}


def check(folder: Path, *names: str, target: str = EXAMPLE, options: Sequence[str] = ()) -> Any:
    return check_releases(target, "reference", Folders(folder), names, options).results


@pytest.mark.slow
def test_verdicts_of_real_processes(tmp_path: Path) -> None:
    few = ["--seed=3", "--seeds=1", "--select=CONN-4"]
    (ran,) = check(tmp_path, "reference", options=few)
    elsewhere, unheard = check(tmp_path, "1.0", "unheard-of", options=few)
    assert (ran.verdict, ran.reason) == (Verdict.GREEN, "")
    assert ran.report["runs"]["num_seeds"] == 1
    assert (elsewhere.verdict, elsewhere.reason) == (
        Verdict.COULD_NOT_RUN,
        "the runs used reference, not 1.0",
    )
    assert (unheard.verdict, unheard.reason) == (Verdict.COULD_NOT_RUN, "no such release")
    (missing,) = check(tmp_path, "reference", target="nowhere.py:Nothing")
    assert missing.verdict is Verdict.COULD_NOT_RUN
    assert "there is no file 'nowhere.py'" in missing.reason


def test_the_release_is_first_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("raise SystemExit('the release was imported')")
    (result,) = check(tmp_path, "reference")
    assert result.verdict is not Verdict.GREEN
    assert "the release was imported" in result.reason


def test_ctrl_c_ends_the_processes_in_order(tmp_path: Path) -> None:
    begun = threading.Event()

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    results = check_releases(
        EXAMPLE,
        "reference",
        Folders(tmp_path),
        ["reference"] * 6,
        ["--seeds=100000"],
        on_progress=lambda text: begun.set(),
    ).results
    assert {result.verdict for result in results} == {Verdict.INTERRUPTED}
    assert len(results) == 6


def test_ctrl_c_while_a_process_starts_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    (result,) = check(tmp_path, "reference", options=["--seeds=100000"])
    assert result.verdict is Verdict.INTERRUPTED
    assert started[0].returncode is not None


def report(outcome: str = "passed", **more: Any) -> dict[str, Any]:
    failure = {"law": "CONN-2", "what": "CONN-2: wrong", "seeds": [3, 4]}
    one = {"name": "a", "outcome": outcome, "reason": "", "failure": failure}
    runs = {"engine": "vllm 1.2.3, model runner V2 and V1", "num_seeds": 9}
    return {"is_clean": outcome == "passed", "checks": [one], "runs": runs, **more}


@pytest.mark.parametrize(
    ("code", "said", "found", "verdict", "reason"),
    [
        (0, "", report(), Verdict.GREEN, ""),
        (0, "", None, Verdict.COULD_NOT_RUN, "wrote no report"),
        (0, "", report("failed"), Verdict.NOT_CHECKED, "not clean"),
        (0, "", report(runs=None), Verdict.COULD_NOT_RUN, "the runs used no engine"),
        (0, "", report(runs={"engine": "vllm 1.2.30"}), Verdict.COULD_NOT_RUN, "not 1.2.3"),
        (1, "", report("failed"), Verdict.FAILED, "CONN-2: wrong (2 of 9 seeds)"),
        (4, "", report("not checked"), Verdict.NOT_CHECKED, "CONN-2: wrong"),
        (2, "a\nkvview: no such option\nb\n", None, Verdict.COULD_NOT_RUN, "no such option"),
        (2, "kvview: No module named 'x.y'", None, Verdict.COULD_NOT_RUN, "pip install x "),
        (2, "kvview: No module named 'an.old'", None, Verdict.COULD_NOT_RUN, "an 1.2.3 has no"),
        (3, "kvview: it raised", None, Verdict.FAILED, "it raised"),
        (5, "kvview: a bug", None, Verdict.BUG, "a bug"),
        (77, "oh", None, Verdict.COULD_NOT_RUN, "exit code 77: oh"),
        (-signal.SIGSEGV, "", None, Verdict.COULD_NOT_RUN, "SIGSEGV"),
        (130, "", report(), Verdict.INTERRUPTED, "before the last run"),
    ],
)
def test_the_verdict_of_a_process(
    code: int, said: str, found: dict[str, Any] | None, verdict: Verdict, reason: str
) -> None:
    judged = judge("1.2.3", code, said, found, "an")
    assert judged[0] is verdict
    assert reason in judged[1]
    assert bool(judged[1]) == (verdict is not Verdict.GREEN)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_green_ends_with_0(verdict: Verdict) -> None:
    results = [ReleaseResult("1", Verdict.GREEN), ReleaseResult("2", verdict)]
    made = UpgradeReport("t", "e", results)
    assert (made.exit_code == ExitCode.CLEAN) == made.is_clean == (verdict is Verdict.GREEN)
    assert [each["verdict"] for each in made.to_dict()["releases"]] == ["green", verdict]
    assert not UpgradeReport("t", "e", []).is_clean


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["check", *args])


def test_a_release_that_could_not_run_is_told_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrade, "VLLMReleases", lambda: Folders(tmp_path))
    result = run(EXAMPLE, "--vllm", "unheard-of")
    assert result.exit_code == ExitCode.COULD_NOT_RUN
    assert result.stderr == "kvview: vllm unheard-of: could not run, 0 s: no such release\n"
