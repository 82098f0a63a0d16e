"""The folders of ``results/``, and the faults that a submission can have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs import make_results, submissions
from docs.make_results import faults, run
from docs.submissions import read

README = """# Mine

```toml
owner = "Me"
project = "https://example.com/mine"
version = "mine==1.0"
```

## Reproduce

```sh
pip install mine==1.0
kvview check mine:Mine --engine vllm --report-json results/mine/0.33.0-check.json
```
"""
REPORT: dict[str, Any] = {
    "target": "mine:Mine",
    "engine": "vllm 0.33.0, model runner V2",
    "date": "2026-11-29",
    "versions": {"kvview": "1.0.0"},
    "replaced": [],
    "profiles": [
        {"name": "connector", "verdict": "green", "counts": {"passed": 31}, "findings": []}
    ],
    "reproduce": ["pip install mine==1.0", "kvview check mine:Mine --engine=vllm"],
    "schema_version": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "README.md").write_text(README)
    (folder / "0.33.0-check.json").write_text(json.dumps(REPORT))
    return folder


def test_the_folders_of_this_repository_have_no_fault() -> None:
    assert faults(submissions.submissions()) == []


def test_a_folder_as_documented_has_no_fault(folder: Path) -> None:
    assert faults([folder]) == []


def test_the_example_of_the_rules_is_a_readme() -> None:
    text = (submissions.RESULTS / "README.md").read_text("utf-8")
    example = re.search(r"^````markdown\n(.*?)^````$", text, re.DOTALL | re.MULTILINE)
    assert example is not None
    assert submissions.read_readme("my-connector", example[1], []).about.owner == "Acme"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# Mine\n", "", "README.md: expected a heading"),
        ("owner", "boss", "README.md: the block in toml: owner: Field required"),
        ("https", "http", "README.md: project is 'http://example.com/mine'"),
        ("mine==1.0", "mine", "README.md: the commands for 0.33.0-check.json lack the line"),
        ('"mine==1.0"', '"main"', "README.md: the version 'main' is neither in Reproduce nor"),
        ('"mine==1.0"', '"3.0"', "README.md: the version '3.0' is neither in Reproduce nor"),
        ('1.0"\n', '1.0"\n[upstream]\nkeys = "a reason"\n', "README.md: upstream.keys, but"),
        ("## Reproduce", "## Notes", "README.md: expected a section 'Reproduce'"),
        ("0.33.0-check.json", "0.33.0.json", "README.md: Reproduce has no command with"),
        ("--engine vllm", "--seeds 2", "0.33.0-check.json: its command is 'kvview check"),
    ],
)
def test_each_fault_of_a_readme_is_one_line(folder: Path, old: str, new: str, message: str) -> None:
    (folder / "README.md").write_text(README.replace(old, new, 1 if '"' in old else -1))
    found = faults([folder])
    assert found[0].startswith(f"results/mine/{message}"), found
    assert not any("\n" in line for line in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": None}, "0.33.0-check.json: not a file of --report-json: target"),
        ({"engine": "vllm 0.32.0"}, "0.33.0-check.json: the report is about vllm 0.32.0"),
        ({"counts": {"passed": 30, "failed": 1}}, "0.33.0-check.json: connector is 'green', but"),
        (
            {
                "verdict": "could not run",
                "counts": {},
                "findings": [
                    {
                        "subject": "mine:Mine",
                        "outcome": "could not run",
                        "evidence": "target 'mine:Mine' cannot be imported: "
                        "ModuleNotFoundError: No module named 'mine'",
                    }
                ],
            },
            "0.33.0-check.json: a module was not installed: target 'mine:Mine'",
        ),
        ({"name": "speed"}, "0.33.0-check.json: the class 'speed' is not one of"),
        (
            {"verdict": "red", "counts": {"failed": 1}},
            "README.md: 0.33.0-check.json is red for connector",
        ),
    ],
)
def test_each_fault_of_a_report_is_one_line(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    report = json.loads(json.dumps(REPORT))
    for key, value in changes.items():
        (report if key in report else report["profiles"][0])[key] = value
    (folder / "0.33.0-check.json").write_text(json.dumps(report))
    (line,) = faults([folder])
    assert line.startswith(f"results/mine/{message}")


def test_a_link_to_a_missing_script_is_a_fault(folder: Path) -> None:
    link = "[script](../results/upstream/nothing.py)"
    text = README.replace('1.0"\n', f'1.0"\n[upstream]\nconnector = "{link}"\n', 1)
    (folder / "README.md").write_text(text)
    assert "../results/upstream/nothing.py, which is no file" in faults([folder])[1]


def test_a_helper_next_to_the_reports_runs_from_its_folder(folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps(REPORT))
    copy = f"cp {report} results/mine/0.33.0-check.json"
    command = f"[ results/mine/server.py = $(echo results/min)e/server.py ] && {copy}"
    text = re.sub(r"(?<=```sh\n).*?(?=```)", f"{command}\n", README, flags=re.DOTALL)
    (folder / "README.md").write_text(text)
    assert list(run(read(folder))) == []


def test_the_name_of_a_folder_has_lower_case(folder: Path) -> None:
    other = folder.rename(folder.with_name("Mine"))
    assert "results/Mine/the name of the folder has only lower-case" in faults([other])[0]


def test_a_file_with_another_name_is_a_fault(folder: Path) -> None:
    (folder / "0.33.0-check.json").rename(folder / "mine.json")
    assert faults([folder]) == [
        "results/mine/mine.json: the name is not RELEASE-CHECK.json, as 0.33.0-check.json"
    ]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cp {report} results/mine/0.33.0-check.json", None),
        ("sed s/green/red/ {report} > results/mine/0.33.0-check.json", "expected {'connector'"),
        ("sleep 100 &", "the commands did not write this report"),
    ],
)
def test_the_commands_of_a_folder_run_and_their_verdicts_are_compared(
    folder: Path, tmp_path: Path, command: str, message: str | None
) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps(REPORT))
    script = command.format(report=report)
    text = re.sub(r"(?<=```sh\n).*?(?=```)", f"{script}\n", README, flags=re.DOTALL)
    (folder / "README.md").write_text(text)
    found = list(run(read(folder)))
    assert (message is None) == (found == [])
    assert all(str(message) in line for line in found)


def test_a_row_with_a_selection_or_without_a_class_is_partial(folder: Path) -> None:
    submission = read(folder)
    row = make_results.Row(submission, "0.33.0", submission.reports)
    assert not row.is_whole
    (profile,) = submission.reports[0].result.profiles
    for name in ("keys", "layouts"):
        copy = json.loads(json.dumps(REPORT["profiles"][0])) | {"name": name}
        submission.reports[0].result.profiles.append(type(profile)(**copy))
    assert row.is_whole
    submission.reports[0].result.reproduce[-1] += " --select=check_a"
    assert not row.is_whole
