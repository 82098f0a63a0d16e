"""A tier store under LMCache: LMCache's own check and benchmark, damage, and stores that fail."""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("xxhash")
pytest.importorskip("cryptography", reason="needs tests/vllm/requirements-clients.txt")
pytest.importorskip("aiofile", reason="needs tests/vllm/requirements-clients.txt")
pytest.importorskip("lmcache", reason="needs tests/vllm/requirements-clients.txt")

import torch

from kvview import ConfigError
from kvview.testing import run_checks
from tests.clients import FAULTS

# LMCache's logging uses a class that OpenTelemetry has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.LoggingHandler:DeprecationWarning")

FILES = "examples/folder_store.py:FolderConnector"
FAULTY = "tests.tier.faulty_store:FaultyStore"
NUM_FLOATS = 1024


def configured(**params: Any) -> str:
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "kvview_lmcache",
            "class_name": "KVViewL2Adapter",
            "adapter_params": {"weights": "1", **params},
        }
    )


def ran(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_lmcaches_own_check_passes(tmp_path: Path) -> None:
    adapter = configured(store=FILES, options={"root": str(tmp_path)})
    output = ran("-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--model", "m",
               "--num-keys", "8", "--l2-adapter", adapter)  # fmt: skip
    assert output.count("8/8") == 8, output
    assert "FAIL" not in output


class Driven:
    """The adapter as LMCache makes it, called as LMCache's controllers do."""

    def __init__(self, **params: Any) -> None:
        import lmcache.v1.check.check_mode_test_l2_adapter as checks
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

        self._checks: Any = checks
        parsed = parse_args_to_l2_adapters_config(
            argparse.Namespace(l2_adapter=[configured(**params)])
        )
        self.memory = torch.zeros(64 * NUM_FLOATS)
        self.adapter: Any = create_l2_adapter(
            parsed.adapters[0], l1_memory_desc=checks._create_l1_memory_desc(self.memory)
        )

    def key(self, number: int, salt: str = "") -> Any:
        from lmcache.v1.distributed.api import ObjectKey

        return ObjectKey(
            chunk_hash=bytes([number]) * 32, model_name="m", kv_rank=0, cache_salt=salt
        )

    def page(self, place: int, fill: float) -> Any:
        row = self.memory[place * NUM_FLOATS : (place + 1) * NUM_FLOATS]
        return self._checks._create_memory_obj(
            raw_data=row, fill_value=fill, obj_size=NUM_FLOATS, dtype=torch.float32
        )

    def wait(self, fd: int) -> None:
        from lmcache.v1.platform import consume_fd

        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(60_000), "no event is signalled"
        consume_fd(fd)

    def store(self, *numbers: int) -> bool:
        task = self.adapter.submit_store_task(
            [self.key(n) for n in numbers], [self.page(n, n + 1.0) for n in numbers]
        )
        self.wait(self.adapter.get_store_event_fd())
        return bool(self.adapter.pop_completed_store_tasks()[task].is_successful())

    def lookup(self, *keys: Any) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task([*keys], {})
        self.wait(self.adapter.get_lookup_and_lock_event_fd())
        bits = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None
        return [bits.test(n) for n in range(len(keys))]

    def load(self, *numbers: int) -> list[bool]:
        """Return whether each page was loaded, and check the loaded ones."""
        pages = [self.page(30 + n, 0.0) for n in numbers]
        task = self.adapter.submit_load_task([self.key(n) for n in numbers], pages)
        self.wait(self.adapter.get_load_event_fd())
        bits = self.adapter.query_load_result(task)
        flags = [bits.test(n) for n in range(len(numbers))]
        for number, page, flag in zip(numbers, pages, flags, strict=True):
            assert not flag or bool((page.tensor == number + 1.0).all())
        return flags


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Driven]:
    made = Driven(store=FILES, options={"root": str(tmp_path)})
    yield made
    made.adapter.close()
    made.adapter.close()


def test_a_page_is_found_by_its_whole_key(driven: Driven) -> None:
    assert driven.store(0, 1, 2)
    keys = [driven.key(0), driven.key(9), driven.key(1, "salt"), driven.key(2)]
    assert driven.lookup(*keys) == [True, False, False, True]
    assert driven.load(2, 9, 0) == [True, False, True]
    assert driven.adapter.get_usage().total_bytes_used == 3 * NUM_FLOATS * 4
    assert driven.store(0), "a second time"
    assert driven.adapter.get_usage().total_bytes_used == 3 * NUM_FLOATS * 4
    driven.adapter.delete([driven.key(0), driven.key(9)])
    assert driven.lookup(driven.key(0), driven.key(1)) == [False, True]
    assert driven.adapter.get_usage().total_bytes_used == 2 * NUM_FLOATS * 4
    assert driven.adapter.report_status()["is_healthy"]


def test_a_wrong_task_fails_alone(driven: Driven) -> None:
    assert not driven.store(3, 3)
    assert driven.load(3, 3) == [False, False]
    assert driven.store(3)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_store_ends_every_task_and_gives_no_wrong_bytes(fault: str) -> None:
    driven = Driven(store=FAULTY, deadline=0.3, lookup_deadline=0.2)
    assert driven.store(0, 1, 2, 3)
    under = driven.adapter.guard.store
    under.fault = fault
    driven.store(4, 5)
    driven.lookup(*(driven.key(n) for n in range(6)), driven.key(20))
    for number in range(4):
        driven.load(number, 20)
    under.heal()
    driven.adapter.close()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"store": FILES, "weights": ""}, "set 'weights' to their revision"),
        ({"store": FILES, "rot": 1}, "rot: Extra inputs are not permitted"),
        ({"store": "kvview.tier:Namespace"}, "is not a class of tier stores"),
        ({"store": FILES}, ""),  # without a root
        ({}, ""),
    ],
)
def test_a_wrong_setting_is_an_error_in_lmcache(params: dict[str, Any], message: str) -> None:
    with pytest.raises(
        ConfigError, match=f"kvview_lmcache, adapter_params: .*{message}" if message else None
    ):
        Driven(**params)


def test_evicted_pages_are_not_counted(tmp_path: Path) -> None:
    entry = NUM_FLOATS * 4
    options = {"root": str(tmp_path), "max_bytes": 5 * (entry + 1024), "threads": 1}
    driven = Driven(store="kvview_reference.tier:FileStore", options=options)
    for number in range(12):
        assert driven.store(number)
    driven.load(0)  # it processes the last evictions
    num_files = sum(1 for path in tmp_path.rglob("??/*") if path.is_file())
    assert 1 <= num_files < 12
    assert driven.adapter.get_usage().total_bytes_used == num_files * entry
    driven.adapter.close()


def test_the_kit_finds_the_faults_of_lmcaches_own_file_adapter() -> None:
    from kvview_lmcache.l2_adapter_store import L2AdapterStore

    options = {"adapter": "fs", "base_path": "{tmp}"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of read-only pages
        report = run_checks(L2AdapterStore, options=options, select=["TIER-1"])
    assert "check_tier_1" in {result.check.name for result in report.failures}
