"""Levels: what a partial implementation has to pass, and what is not told."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kvview import ConfigError
from kvview.cli.commands import cli
from kvview.cli.exit_codes import ExitCode
from kvview.testing import run_checks
from kvview.testing.levels import FEWEST_SEEDS, Level, Scope, judge_level

pytest.importorskip("torch")

PARTIAL = """
from kvview_reference.harness import ReferencePool
from kvview_reference.pool import BlockPoolView


class Bare(ReferencePool):
    capabilities = frozenset()


class NoEviction(ReferencePool):
    capabilities = ReferencePool.capabilities - {"evict"}


class Wrong(Bare):
    def make_view(self):
        class View(BlockPoolView):
            def free_blocks(self, block_ids, /):
                self._open_pool().free_blocks(block_ids)

        return View(self.pool, "wrong")
"""
GOOD = [("core", "passed", "a"), ("full", "passed", "b"), (None, "skipped", "c")]


def check(tmp_path: Path, name: str, *args: str) -> tuple[int, str]:
    (tmp_path / "target.py").write_text(PARTIAL)
    result = CliRunner().invoke(cli, ["check", f"{tmp_path / 'target.py'}:{name}", *args])
    return result.exit_code, result.output.strip().splitlines()[-1]


def test_what_lacks_the_optional_has_core_to_pass(tmp_path: Path) -> None:
    assert check(tmp_path, "Bare", "--level", "core") == (
        ExitCode.CLEAN,
        "level core: no more was asked for",
    )
    assert check(tmp_path, "Wrong", "--level", "core")[0] == ExitCode.WRONG


def test_full_asks_for_every_capability(tmp_path: Path) -> None:
    code, told = check(tmp_path, "NoEviction", "--level", "full")
    assert code == ExitCode.NOT_CHECKED
    assert told.startswith("level core: check_pool_")
    assert told.endswith(" more")


@pytest.mark.parametrize(
    ("change", "reached"),
    [
        ({}, Level.FULL),
        ({"scope": Scope.CORE}, Level.CORE),
        ({"scope": Scope.PART}, None),
        ({"is_interrupted": True}, None),
        ({"checks": [("core", "failed", "a"), *GOOD[1:]]}, None),
        ({"checks": [("core", "expected failure", "a"), *GOOD[1:]]}, None),
        ({"checks": [GOOD[0], ("full", "expected failure", "b")]}, Level.CORE),
        ({"checks": [GOOD[0], ("full", "skipped", "b")]}, Level.CORE),
        ({"runs": (FEWEST_SEEDS - 1, {"loads": 9})}, None),
        ({"runs": (FEWEST_SEEDS, {"loads": 9})}, Level.FULL),
        ({"runs": (FEWEST_SEEDS, {"hits": 9})}, None),
    ],
)
def test_what_is_told(change: dict[str, object], reached: Level | None) -> None:
    given = {"scope": Scope.ALL, "checks": GOOD, "runs": None, "is_interrupted": False} | change
    level, why = judge_level(**given)  # type: ignore[arg-type]
    assert level is reached
    assert bool(why) != (level is Level.FULL)


def test_a_level_is_of_all_checks() -> None:
    from kvview_reference.harness import pool

    with pytest.raises(ConfigError, match="a level is told of all checks"):
        run_checks(pool, level="core", select=["POOL-1"])
    with pytest.raises(ConfigError, match="unknown level 'silver'; known: core, full"):
        run_checks(pool, level="silver")
    report = run_checks(pool, steps=3)
    assert report.scope is Scope.PART, "a shorter search is a part"


def test_a_connector_that_only_stores_has_core_to_pass() -> None:
    from tests.connector.unusual import Produces

    report = run_checks(Produces, seeds=3, level="core")
    assert not report.failures
    assert not report.not_checked
    assert report.misses_its_level, "three seeds are no level"
    assert run_checks(Produces, seeds=3).not_checked
