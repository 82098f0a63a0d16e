"""Green means that the code ran, that loads arrived, and that no exception was lost."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from examples import host_cache
from kvview import ConfigError
from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview.targets import load_connector
from kvview.testing.connector import check_connector, generate_scenario
from kvview.testing.connector.confirm.first_error import first_error
from kvview.testing.connector.exercised.author_code import AuthorCode
from kvview.testing.connector.result import SimulationResult
from kvview.testing.placeholders import in_size
from tests.cases import read_cases
from tests.testing import unrun_code
from tests.testing.unrun_code import (
    CannotLoad,
    TwoLevels,
)

FILE = Path(unrun_code.__file__)
SCHEDULER = "        return HostCacheScheduler(self.config, self.options.cpu_blocks)"
SEEDS = ("--seed", "15", "--seeds", "15")  # without steady runs, which take as long as ten others


def line_of(text: str) -> int:
    return FILE.read_text().splitlines().index(text) + 1


def run(connector: str, *args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["check", f"{FILE}:{connector}", *map(str, args)])


# --- code that never ran ---


@pytest.mark.slow
def test_code_that_never_ran_is_not_checked() -> None:
    place = f"unrun_code.py:{line_of('            self.shorten()')}"
    result = run("TwoLevels", *SEEDS)
    assert result.exit_code == ExitCode.NOT_CHECKED, result.output
    assert result.output.startswith(f"not checked: {place} in Recent.add never ran: self.shorten()")
    assert "--option NAME='{blocks}/4'" in result.output
    assert "Recent.statistics never ran" not in result.output, "no hook leads there"


@pytest.mark.slow
def test_a_line_that_is_expected_not_to_run_is_green(tmp_path: Path) -> None:
    expected = tmp_path / "expected.toml"
    line = line_of("            self.shorten()")
    law = f"coverage: unrun_code.py:{line}"
    expected.write_text(f"[[expected]]\nlaw = '{law}'\nreason = 'the limit is never reached'\n")
    result = run("TwoLevels", *SEEDS, "--expected", expected)
    assert result.exit_code == ExitCode.CLEAN, result.output


@pytest.mark.slow
def test_with_the_option_all_code_runs() -> None:
    runs = check_connector(
        TwoLevels, first_seed=15, seeds=15, options={"recent_blocks": "{blocks}/4"}
    )
    assert not [gap for gap in runs.gaps if "unrun_code.py" in gap.name]
    listed = {one.source for one in runs.unrun}
    assert {"raise ValueError(job_id)", 'log.exception("a copy failed")'} <= listed


def test_the_code_of_a_connector_is_found() -> None:
    code = AuthorCode(TwoLevels)
    assert {str(FILE), host_cache.__file__} <= {*code.paths}
    lines = [SCHEDULER, "        self.recent = Recent(options.recent_blocks)"]
    code.add({str(FILE): [line_of(line) for line in lines]})
    functions = {one.function for one in code.unrun}
    assert {"Recent.shorten", "TwoLevelWorker.start_plan", "TwoLevels.make_worker"} <= functions
    assert not any("CannotRead" in name for name in functions), "part of another connector"
    code.add({path: range(1, 1000) for path in (str(FILE), str(host_cache.__file__))})
    assert not code.unrun
    assert code.is_complete


def test_code_in_the_file_of_a_base_counts(tmp_path: Path) -> None:
    target = tmp_path / "mine.py"
    target.write_text(f"""
from kvview.targets import load_connector

class Mine(load_connector({f"{FILE}:TwoLevels"!r})):
    pass
""")
    code = AuthorCode(load_connector(f"{target}:Mine"))
    assert {str(target), str(FILE), host_cache.__file__} <= {*code.paths}


def test_code_for_errors_and_without_an_effect_is_listed_only(tmp_path: Path) -> None:
    target = tmp_path / "mine.py"
    target.write_text("""
import kvview

class Mine(kvview.Connector):
    def make_worker(self):
        if self.config is None:
            return
        try:
            made = object()
        except OSError:
            made = object
        print(made)
        self.made = made
""")
    code = AuthorCode(load_connector(f"{target}:Mine"))
    assert code.paths == [str(target)]
    code.add({str(target): [5, 6, 8, 9, 12]})
    assert [one.source for one in code.unrun if one.is_judged] == ["self.made = made"]


BASES = """
import kvview

class Base(kvview.Connector):
    def make_worker(self):
        return BaseWorker()

class BaseWorker(kvview.WorkerConnector):
    def start_plan(self, plan):
        plan.stores.clear()

class Mine(Base):
    def make_worker(self):
        return OwnWorker(BaseWorker)

class OwnWorker(BaseWorker):
    def start_plan(self, plan):
        plan.loads.clear()
"""


@pytest.mark.parametrize("uses_the_base", [False, True])
def test_a_method_that_a_class_replaces_is_listed_only(tmp_path: Path, uses_the_base: bool) -> None:
    target = tmp_path / "mine.py"
    target.write_text(
        BASES if uses_the_base else BASES.replace("OwnWorker(BaseWorker)\n", "OwnWorker()\n")
    )
    code = AuthorCode(load_connector(f"{target}:Mine"))
    lines = [
        number
        for number, line in enumerate(BASES.splitlines(), 1)
        if "Own" in line or "loads" in line
    ]
    code.add({str(target): lines})
    judged = [one.function for one in code.unrun if one.is_judged]
    assert judged == (["BaseWorker.start_plan"] if uses_the_base else [])


def test_few_seeds_that_hardly_run_any_code_are_not_green() -> None:
    code = AuthorCode(TwoLevels)
    code.add({str(FILE): [line_of(SCHEDULER)]})
    (gap,) = code.gaps(3)
    assert gap.name == "code"
    assert re.fullmatch(r"\d+ of \d+ statements ran in 3 seeds", gap.what)
    assert list(code.notes([gap])) == ["run at least 15 --seeds to list the lines that never ran"]


@pytest.mark.parametrize(
    ("kind", "text", "expected"), read_cases(Path(__file__).with_name("sizes.txt"))
)
def test_sizes_are_expressions(kind: str, text: str, expected: str) -> None:
    if kind == "right":
        assert in_size({"a": [text]}, 4, 1024) == {"a": [json.loads(expected)]}
        return
    with pytest.raises(ConfigError, match=expected) as caught:
        in_size({"a": text}, 4, 1024)
    assert "\n" not in str(caught.value)


# --- loads that fail by themselves, and exceptions ---


def test_loads_that_fail_by_themselves_are_not_green() -> None:
    runs = check_connector(CannotLoad, seeds=2, first_seed=64)
    assert not runs.failures
    (gap,) = [gap for gap in runs.gaps if gap.name == "failed loads"]
    assert "loads failed without an injected failure; the first: FileNotFoundError" in gap.what

    line = line_of('            with open("/nonexistent/page", "rb"):')
    assert f"unrun_code.py:{line}: with open(" in gap.what


def test_the_end_of_an_await_is_not_reported_as_the_error(tmp_path: Path) -> None:
    (file := tmp_path / "awaits.py").write_text("""
async def answer():
    return False
async def load():
    return await answer()
""")
    code = runpy.run_path(str(file))

    def play() -> SimulationResult:
        asyncio.run(code["load"]())
        return SimulationResult(generate_scenario(0), None, (), first_error="a page was missing")

    assert first_error([str(file)], play) == "a page was missing"
