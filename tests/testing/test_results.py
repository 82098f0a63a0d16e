"""The table of results: ours are in it, and a submission that does not hold together is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvview import ConfigError
from kvview.testing import results

ROOT = Path(__file__).parents[2]
OURS = sorted((ROOT / "results").glob("*.json"))

pytestmark = pytest.mark.skipif(not OURS, reason="no results beside these tests")


@pytest.fixture
def given() -> dict[str, Any]:
    submission: dict[str, Any] = json.loads((ROOT / "results" / "filestore.json").read_text())
    return submission


def test_the_page_is_what_the_submissions_say() -> None:
    page = (ROOT / results.PAGE).read_text()
    submissions = [results.read_submission(file) for file in OURS]
    assert results.write_table(submissions, page) == page, "python -m kvview.testing.results table"
    assert {one.report.contract for one in submissions} >= {"pool", "offloading", "connector"}


def _skip_a_check(given: dict[str, Any]) -> None:
    given["report"]["checks"][0]["outcome"] = "failed"


def _drop_a_check(given: dict[str, Any]) -> None:
    check = given["report"]["checks"].pop(0)
    given["report"]["counts"][check["outcome"]] -= 1


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "counts are": _skip_a_check,
    "did not end": _drop_a_check,
    "without a reason": lambda g: [c.update(reason="") for c in g["report"]["checks"]],
    "a path of one machine": lambda g: g.update(command="kvview check /home/me/x.py:X"),
    "the target has a path": lambda g: g["report"].update(target="~/x.py:X"),
    "format_version 2, and known is 1": lambda g: g.update(format_version=2),
    "implementation.url": lambda g: g["implementation"].update(url="javascript:alert(1)"),
    "versions does not name kvview": lambda g: g["report"].update(versions={}),
    "Extra inputs": lambda g: g.update(score=11),
    "Field required": lambda g: g.pop("report"),
    "runs are of connectors": lambda g: g["report"].update(contract="connector"),
}


@pytest.mark.parametrize("told", DAMAGE)
def test_what_does_not_hold_together_is_refused(
    told: str, given: dict[str, Any], tmp_path: Path
) -> None:
    DAMAGE[told](given)
    file = tmp_path / "x.json"
    file.write_text(json.dumps(given))
    with pytest.raises(ConfigError) as error:
        results.read_submission(file)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "7", "\x00"])
def test_no_submission_at_all(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError):
        results.read_submission(file)
    assert results.main(["check", str(file)]) == 2
    assert results.main(["check", str(tmp_path / "none.json")]) == 2


def test_text_from_outside_stays_text(given: dict[str, Any]) -> None:
    given["implementation"]["name"] = "<script>x</script> | [y](z) `c`"
    submission = results.SubmissionModel.model_validate(given)
    page = results.write_table([submission], "<!-- table --><!-- end of the table -->")
    row = page.splitlines()[4]
    assert row.replace(r"\|", "").count("|") == 7
    assert "<script" not in page
    assert r"\[y\](z)" in row


def test_add_refuses_what_is_no_fresh_report(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, file = given["report"], tmp_path / "report.json"
    about = ["--name", "X", "--version", "1", "--url", "https://x.invalid", "--command", "kvview"]
    about += ["--file", str(tmp_path / "x.json")]

    def add(**changes: object) -> str:
        file.write_text(json.dumps(report | changes))
        code = results.main(["add", str(file), *about])
        told = capsys.readouterr()
        assert code == (0 if told.out else 2)
        return told.out + told.err

    assert "with another kvview than this one" in add(versions={"kvview": "0.1"})
    assert "not a report of kvview check" in add(target=None)
    renamed = [dict(check, name=f"{check['name']}_") for check in report["checks"]]
    assert "are missing" in add(checks=renamed)
