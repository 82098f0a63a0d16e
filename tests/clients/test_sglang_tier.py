"""A tier store under SGLang's HiCache: its factory, its page methods in each layout, and faults."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("xxhash")

import torch

from kvview import ConfigError
from kvview.testing import run_checks

from . import FAULTS, sglang_sources

try:
    sglang_sources.make_importable()
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    from kvview_sglang.hicache_store import HiCacheFileStore
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

FILES = "examples/folder_store.py:FolderConnector"
FAULTY = "tests.tier.faulty_store:FaultyStore"
PAGE_SIZE, NUM_PAGES = 4, 12
NAMED = {
    "backend_name": "kvview",
    "module_path": "kvview_sglang",
    "class_name": "KVViewHiCache",
    "interface_v1": 1,
}


class HostPool:
    """The memory of a host pool, with SGLang's own methods for its pages (``page_methods``)."""

    def __init__(self, layout: str, *, is_mla: bool = False, dtype: Any = torch.bfloat16) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, PAGE_SIZE
        self.layer_num, self.head_num, self.head_dim, self.kv_cache_dim = 3, 2, 8, 16
        self.device, self.pin_memory = "cpu", False
        file, name = ("mla.py", "MLA") if is_mla else ("mha.py", "MHA")
        for method, call in sglang_sources.page_methods(file, f"{name}TokenToKVPoolHost").items():
            setattr(self, method, call.__get__(self))
        if is_mla:
            self._storage_page_index = int
        tokens = PAGE_SIZE * NUM_PAGES
        last = (1, self.kv_cache_dim) if is_mla else (self.head_num, self.head_dim)
        shape = {
            "layer_first": (self.layer_num, tokens, *last),
            "page_first": (tokens, self.layer_num, *last),
            "page_first_direct": (NUM_PAGES, self.layer_num, PAGE_SIZE, *last),
            "page_head": (NUM_PAGES, self.head_num, PAGE_SIZE, self.layer_num, self.head_dim),
        }[layout]
        self.kv_buffer = torch.zeros(shape if is_mla else (2, *shape), dtype=dtype)
        self._made: Any = self.kv_buffer.numel()

    def fill(self) -> None:
        generator = torch.Generator().manual_seed(random.Random(self.layout).randrange(99))
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=generator))


def backend(pool: HostPool, *, extra: dict[str, Any], **changes: Any) -> Any:
    fields = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": "page_first" in pool.layout, "model_name": "m",
        "extra_config": NAMED | {"tier": extra},
    } | changes  # fmt: skip
    made: Any = StorageBackendFactory.create_backend(
        "dynamic", HiCacheStorageConfig(**fields), pool
    )
    made.register_mem_pool_host(pool)
    made.register_mem_host_pool_v2(pool, PoolName.KV)
    return made


def files(root: Path) -> dict[str, Any]:
    return {"weights": "1", "store": FILES, "options": {"root": str(root)}}


def indices(*pages: int) -> Any:
    return torch.tensor([page * PAGE_SIZE + at for page in pages for at in range(PAGE_SIZE)])


@pytest.fixture(
    params=["layer_first", "page_first", "page_first_direct", "page_head", "mla layer_first",
            "mla page_first", "mla page_first_direct"]
)  # fmt: skip
def pool(request: pytest.FixtureRequest) -> HostPool:
    made = HostPool(request.param.removeprefix("mla "), is_mla="mla" in request.param)
    made.fill()
    return made


def is_same(pool: HostPool, before: Any, page: int, source: int) -> bool:
    """Return whether a page of the pool has the bytes that another page had before."""
    now = pool.get_data_page(page * PAGE_SIZE, flat=True)  # type: ignore[attr-defined]
    pool.kv_buffer, after = before, pool.kv_buffer
    then = pool.get_data_page(source * PAGE_SIZE, flat=True)  # type: ignore[attr-defined]
    pool.kv_buffer = after
    return bool(torch.equal(now, then))


def test_every_interface_stores_and_loads_pages(pool: HostPool, tmp_path: Path) -> None:
    storage = backend(pool, extra=files(tmp_path))
    before = pool.kv_buffer.clone()
    assert storage.batch_set_v1(["a", "b"], indices(0, 1)) == [True, True]
    out = [PoolTransfer(PoolName.KV, host_indices=indices(2, 3), keys=["c", "d"])]
    assert storage.batch_set_v2(out) == {PoolName.KV: [True, True]}
    assert storage.set("e", pool.get_data_page(4 * PAGE_SIZE))  # type: ignore[attr-defined]
    assert storage.batch_exists(["a", "b", "c", "d", "e", "f"]) == 5
    assert storage.exists("e")
    assert not storage.exists("f")
    assert storage.batch_get_v1(["e", "x", "a"], indices(5, 6, 7)) == [True, False, True]
    back = [PoolTransfer(PoolName.KV, host_indices=indices(8, 9), keys=["d", "b"])]
    assert storage.batch_get_v2(back) == {PoolName.KV: [True, True]}
    for page, source in ((5, 4), (6, 6), (7, 0), (8, 3), (9, 1)):
        assert is_same(pool, before, page, source)
    target = pool.get_dummy_flat_data_page()  # type: ignore[attr-defined]
    assert torch.equal(
        storage.get("c", target),
        storage.batch_get(["c"], [torch.zeros_like(target)])[0],
    )
    assert storage.get("x", target) is None
    wrong = [PoolTransfer(PoolName.KV, host_indices=indices(1), keys=["a", "b"])]
    assert storage.batch_get_v2(wrong) == {PoolName.KV: [False, False]}
    storage.close()


def test_other_weights_layouts_dtypes_and_ranks_share_nothing(tmp_path: Path) -> None:
    """Pages of two layouts have the same size, and another order of bytes."""
    first = HostPool("layer_first")
    first.fill()
    storage = backend(first, extra=files(tmp_path))
    assert storage.batch_set_v1(["a"], indices(0)) == [True]
    storage.close()
    same: dict[str, Any] = {"pool": HostPool("layer_first"), "extra": files(tmp_path)}
    for change, found in (
        ({}, 1),
        ({"pool": HostPool("page_first")}, 0),
        ({"pool": HostPool("layer_first", dtype=torch.float16)}, 0),
        ({"extra": files(tmp_path) | {"weights": "2"}}, 0),
        ({"model_name": "other"}, 0),
        ({"tp_size": 2}, 0),
        ({"pp_size": 2, "pp_rank": 1}, 0),
    ):
        other = backend(**(same | change))
        assert other.batch_exists(["a"]) == found, change
        other.close()
    one, two = (backend(first, extra=files(tmp_path), tp_size=2, tp_rank=rank) for rank in (0, 1))
    assert one.batch_set_v1(["b"], indices(0)) == [True]
    assert not two.exists("b")
    for each in (one, two):
        each.close()


def test_prefixes_of_several_pools_are_those_of_sglangs_own_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    monkeypatch.delenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", raising=False)
    dice, keys = random.Random(0), [f"{n:064x}" for n in range(6)]
    pool = HostPool("layer_first")
    for number in range(20):
        ours = backend(pool, extra=files(tmp_path / f"ours {number}"))
        config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "m")
        theirs = HiCacheFile(config, str(tmp_path / f"theirs {number}"))
        for each in (ours, theirs):
            each.register_mem_host_pool_v2(pool, PoolName.KV)
            each.register_mem_host_pool_v2(pool, PoolName.MAMBA)
        for name in (PoolName.KV, PoolName.MAMBA):
            held = [n for n in range(6) if dice.random() < 0.8]
            transfer = PoolTransfer(name, host_indices=indices(*held), keys=[keys[n] for n in held])
            for each in (ours, theirs):
                assert all(each.batch_set_v2([transfer])[name])
        for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
            asked = [PoolTransfer(PoolName.MAMBA, keys=keys[:2], hit_policy=policy)]
            assert ours.batch_exists_v2(keys, asked) == theirs.batch_exists_v2(keys, asked)
        ours.close()


@pytest.fixture
def faulty() -> Iterator[Any]:
    made = backend(
        HostPool("layer_first"),
        extra={"weights": "1", "store": FAULTY, "deadline": 0.3, "lookup_deadline": 0.2},
    )
    yield made
    made.guard.store.heal()
    made.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_store_ends_every_call_and_gives_no_wrong_bytes(fault: str, faulty: Any) -> None:
    keys = ["a", "b", "c"]
    pages = [torch.full((500,), float(n + 1)) for n in range(3)]
    assert faulty.batch_set(keys, pages)
    faulty.guard.store.fault = fault
    faulty.batch_set(["d"], pages[:1])
    faulty.batch_exists([*keys, "x"])
    for _ in range(2):
        found = faulty.batch_get([*keys, "x"], [torch.zeros(500) for _ in range(4)])
        assert found[3] is None
        for page, right in zip(found, pages, strict=False):
            assert page is None or torch.equal(page, right)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"store": FILES}, "set 'weights' to their revision"),
        ({"store": FILES, "weights": "1", "rot": 1}, "rot: Extra inputs are not permitted"),
        (None, "the extra config needs an object 'tier' with 'store' and 'weights'"),
    ],
)
def test_a_wrong_setting_is_an_error_in_sglang(extra: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"kvview_sglang, extra config: .*{message}"):
        backend(HostPool("layer_first"), extra=extra)


def test_jobs_and_counters_are_among_sglangs_own_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prometheus: Any = pytest.importorskip("prometheus_client")
    package = "sglang.srt.observability"
    module: Any = ModuleType(f"{package}.metrics_collector")
    module.StorageMetrics = SimpleNamespace
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    pool = HostPool("layer_first")
    pool.fill()
    storage = backend(pool, extra=files(tmp_path), enable_storage_metrics=True)
    assert storage.get_stats() is None
    assert storage.batch_set_v1(["a", "b"], indices(0, 1)) == [True, True]
    assert storage.batch_get_v1(["a", "x"], indices(2, 3)) == [True, False]
    found = storage.get_stats()
    assert (found.backup_pgs, found.prefetch_pgs) == ([2], [1])
    assert min(found.backup_bandwidth + found.prefetch_bandwidth) > 0
    assert storage.get_stats() is None
    labels = {"store": FILES, "tp_rank": "0", "pp_rank": "0"}
    for counter, value in (("puts", 2), ("gets", 1), ("failed", 1)):
        series = f"sglang:kvview_tier_{counter}_total"
        assert prometheus.REGISTRY.get_sample_value(series, labels) == value
    storage.close()


def test_the_kit_finds_the_faults_of_sglangs_own_file_backend() -> None:
    report = run_checks(HiCacheFileStore, options={"root": "{tmp}"}, select=["TIER-1"])
    assert "check_tier_1" in {result.check.name for result in report.failures}
