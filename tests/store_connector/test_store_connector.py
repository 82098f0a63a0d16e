"""The base class: its options, the examples in simulated runs, and pages that outlive a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from typing_extensions import override

from kvview import CacheGeometry, ConfigError, ConnectorConfig
from kvview.bridge import TierOptions, open_tier
from kvview.targets import load_connector
from kvview.testing.command import check
from kvview.testing.connector import (
    Add,
    Fate,
    HoldBlocks,
    Scenario,
    Step,
    generate_scenario,
    simulate,
)
from kvview.testing.connector.exercised.coverage import FAILED_BY_THEMSELVES
from kvview.testing.connector.scenario.scenario import Outcome, WorkerHalf
from kvview.tier import AsyncStore, Namespace
from kvview_reference.replay.command import replay
from kvview_reference.store_connector import StoreConnector

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = f"{EXAMPLES / 'folder_store.py'}:FolderStore"
REMOTE = f"{EXAMPLES / 'remote_store.py'}:RemoteStore"
MEMORY = f"{EXAMPLES / 'host_memory.py'}:HostMemoryStore"


class AnswersInTime(AsyncStore):
    """A service that answers long before its timeout."""

    def __init__(self, namespace: Namespace) -> None:
        self.pages: dict[bytes, bytes] = {}
        super().__init__(namespace)

    @override
    async def fetch(self, key: bytes, page: memoryview, /) -> bool:
        async with asyncio.timeout(30):
            await asyncio.sleep(0.001)
            page[:] = self.pages[key]
        return True

    @override
    async def send(self, key: bytes, page: memoryview, /) -> bool:
        async with asyncio.timeout(30):
            await asyncio.sleep(0.001)
            self.pages[key] = bytes(page)
        return True


class AnswersInTimeConnector(StoreConnector):
    store = AnswersInTime


def test_clocks_that_jump_end_no_timeout_of_a_coroutine() -> None:
    jumps = [seed for seed in range(20) if generate_scenario(seed).clock_jump]
    results = [simulate(AnswersInTimeConnector, generate_scenario(seed)) for seed in jumps]
    assert not any(result.failure for result in results)
    assert sum(result.coverage.get("loads", 0) for result in results) > 0
    assert not any(result.coverage.get(FAILED_BY_THEMSELVES["loads"]) for result in results)


@pytest.mark.parametrize("outcome", ["none", "half"])
@pytest.mark.parametrize("worker_half", ["job_by_job", "whole_plans", "in_a_process"])
def test_a_failed_store_puts_no_wrong_bytes_under_a_key(
    worker_half: WorkerHalf, outcome: Outcome, tmp_path: Path
) -> None:
    evict = (Step(8), HoldBlocks(8), HoldBlocks(0), Step(4))
    requests = (Add("fails", 1, 9, 1), *evict, Add("stores", 1, 9, 1), *evict, Add("loads", 1, 9))
    fates = (Fate(outcome=outcome),)
    run = Scenario(CacheGeometry.single(4), 9, requests, fates, worker_half=worker_half)
    keeps_the_first_page = {"store": "kvview_reference.tier:FileStore", "root": str(tmp_path)}
    given = {**keeps_the_first_page, "weights": "1", "mode": "eager", "cpu_blocks": 0}
    result = simulate(StoreConnector, run, given)
    assert result.failure is None
    assert (result.coverage["failed stores"], result.coverage["stores"]) == (1, 1)
    assert result.coverage["loads"] > 0


def options(given: Sequence[str]) -> list[str]:
    return [part for option in given for part in ("--option", option)]


def assert_green(target: str, *given: str) -> None:
    few = ("--seed", "3", "--seeds", "8")  # after a steady run, which takes as long as ten others
    result = CliRunner().invoke(check, [target, *few, *options(given)])
    assert result.exit_code == 0, result.output


def test_two_levels_are_green_in_a_few_runs() -> None:
    kind = load_connector(f"{EXAMPLES / 'two_levels.py'}:TwoLevelConnector")
    given = {"root": "{tmp}", "cpu_blocks": "{blocks}/4", "store_blocks": "{blocks}"}
    results = [simulate(kind, generate_scenario(seed), given) for seed in range(3, 6)]
    assert not any(result.failure for result in results)
    assert sum(result.coverage.get("loads", 0) for result in results) > 0


def test_pages_without_a_transform_are_stored_in_both_levels_at_once() -> None:
    given = {
        "store": FOLDER,
        "root": "{tmp}",
        "mode": "eager",
        "cpu_blocks": "{blocks}/4",
        "store_blocks": "{blocks}",
    }
    results = [simulate(StoreConnector, generate_scenario(seed), given) for seed in range(3, 6)]
    assert not any(result.failure or result.first_error for result in results)
    assert sum(result.coverage.get("loads", 0) for result in results) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "given"),
    [
        ("host_memory.py:HostMemoryConnector", ["store_blocks={blocks}"]),
        (
            "two_levels.py:TwoLevelConnector",
            ["root={tmp}", "weights=1", "cpu_blocks={blocks}/4", "store_blocks={blocks}"],
        ),
        ("folder_store.py:FolderConnector", ["root={tmp}", "weights=1"]),
        ("sqlite_store.py:SQLiteConnector", ["root={tmp}", "weights=1"]),
        ("compressed_memory.py:CompressedConnector", ["cpu_bytes={bytes}"]),
    ],
)
def test_examples_are_green(example: str, given: list[str]) -> None:
    assert_green(str(EXAMPLES / example), *given)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["victim", "eager", "finish", "exclusive"])
def test_each_mode_is_green(mode: str) -> None:
    assert_green(
        "kvview_reference.store_connector:StoreConnector",
        "cpu_blocks={blocks}",
        f"mode={mode}",
        "enable_events=true",
    )


@pytest.mark.slow
def test_a_server_over_asyncio_is_green(port: int) -> None:
    assert_green(f"{EXAMPLES / 'remote_store.py'}:RemoteConnector", f"port={port}", "weights={tmp}")


def blocks_loaded(folder: Path, *given: str) -> int:
    report = folder / "replay.json"
    arguments = [
        "--connector",
        "kvview_reference.store_connector:StoreConnector",
        "--requests",
        "60",
        "--json",
        str(report),
    ]
    given = (f"store={FOLDER}", f"root={folder}", "mode=finish", *given)
    result = CliRunner().invoke(replay, [*arguments, *options(given)])
    assert result.exit_code == 0, result.output
    loaded: int = json.loads(report.read_text())["loaded_blocks"]
    return loaded


def test_pages_outlive_a_run_under_the_same_weights_alone(tmp_path: Path) -> None:
    first = blocks_loaded(tmp_path, "weights=1")
    again = blocks_loaded(tmp_path, "weights=1")
    assert again > first
    assert blocks_loaded(tmp_path, "weights=2") < again
    assert blocks_loaded(tmp_path) < again


def test_a_tier_of_another_engine_takes_the_store_of_a_connector_but_no_transform() -> None:
    target = f"{EXAMPLES / 'two_levels.py'}:TwoLevelConnector"
    with pytest.raises(ConfigError, match="has a transform, but a transform is not applied"):
        open_tier(TierOptions.model_validate({"store": target}), Namespace("m", weights="1"))


def test_the_class_gives_defaults_and_the_user_changes_them() -> None:
    kind = load_connector(f"{EXAMPLES / 'host_memory.py'}:HostMemoryConnector")
    geometry = CacheGeometry.single(4)
    made = [kind(ConnectorConfig(geometry, given)) for given in ({}, {"store_blocks": 7})]
    assert [one.options.store_blocks for one in made] == [10_000, 7]  # type: ignore[attr-defined]
