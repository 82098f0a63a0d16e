"""A suite is a test as Hypothesis and pytest know it: seeds, profiles, blobs, example database."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

CONFTEST = """
from hypothesis import Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

settings.register_profile(
    "quick",
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # without shrinking, to save time
    report_multiple_bugs=False,
    database=DirectoryBasedExampleDatabase("examples"),  # on CI, Hypothesis has none by default,
    derandomize=False,  # and no random seed
)
settings.load_profile("quick")
settings.register_profile("blob", print_blob=True)
settings.register_profile("one call", max_examples=1, stateful_step_count=1)
settings.register_profile("saved", phases=[Phase.reuse])
"""

SUITE = """
from hypothesis import reproduce_failure, seed
from kvview_reference.harness import ReferenceEnginePool, ReferencePool


class AlwaysResets(ReferenceEnginePool):
    def reset(self):
        super().reset()
        return True


{decorator}
class TestWrong(ReferencePool):
    engine_class = AlwaysResets
"""


class Project:
    """A folder with a suite of a wrong pool.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "conftest.py").write_text(CONFTEST)
        self.decorate("")

    def decorate(self, decorator: str) -> None:
        """Write the suite with a decorator."""
        (self._folder / "test_wrong.py").write_text(SUITE.format(decorator=decorator))

    def run(self, *options: str) -> str:
        """Run the machine with options of pytest; returns the output, empty if the test passed."""
        line = [sys.executable, "-m", "pytest", "-q", "-rN", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*line, "-k", "test_calls", *options],
            cwd=self._folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            capture_output=True,
            text=True,
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return done.stdout if done.returncode else ""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def calls_in(output: str) -> list[str]:
    """Return the script of a failure."""
    assert "POOL-9" in output
    return re.findall(r"state\.\w+\(.*", output)


def test_the_database_has_the_failure_of_the_last_run(project: Project) -> None:
    assert not project.run("--hypothesis-profile=saved"), "there is no failure yet"
    calls = calls_in(project.run())
    assert calls[-2].startswith("state.reset(")
    assert calls_in(project.run("--hypothesis-profile=saved")) == calls


def test_a_profile_sets_the_number_of_runs_and_calls(project: Project) -> None:
    assert not project.run("--hypothesis-profile=one call")


@pytest.mark.parametrize("way", ["option", "decorator"])
def test_a_seed_repeats_a_run(project: Project, way: str) -> None:
    options = ["--hypothesis-seed=5"] if way == "option" else []
    project.decorate("" if options else "@seed(5)")
    assert calls_in(project.run(*options)) == calls_in(project.run(*options))


def test_a_blob_repeats_the_failure(project: Project) -> None:
    output = project.run("--hypothesis-profile=blob")
    blob = re.search(r"@reproduce_failure\(.*\)", output)
    assert blob is not None, output
    project.decorate(blob[0])
    assert calls_in(project.run()) == calls_in(output)
