"""A kvview store below vLLM's own tiering manager, on the real classes of the release."""

from __future__ import annotations

import random
import time
import types
import uuid
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(  # a submodule: this very folder is named vllm
    "vllm.version",
    reason="needs vLLM's Python sources: tests/vllm/sources.py",
    exc_type=ImportError,
)
pytest.importorskip("torch")

from kvview_vllm.releases.tiers import has_tiers, make_tier_job, tier_seam

if not has_tiers():
    pytest.skip("this release has no tiers below the host (0.22.0)", allow_module_level=True)

import torch

from kvview import ConfigError
from kvview_vllm.releases.calls import make_known

with warnings.catch_warnings():  # of torch, when vLLM's kernels are imported
    warnings.simplefilter("ignore")
    from kvview_vllm.tier import KVViewTier

PAGE = 65_536
NUM_HOST_CHUNKS = 8
FILES = "examples/folder_store.py:FolderStore"


@pytest.fixture(autouse=True)
def _fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def make_spec(tier: dict[str, Any]) -> Any:
    """A ``KVViewTieringSpec``, as vLLM makes one from a user's configuration."""
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    engine = uuid.uuid4().hex
    extra = {
        "spec_name": "KVViewTieringSpec",
        "spec_module_path": "kvview_vllm.tier",
        "cpu_bytes_to_use": PAGE * NUM_HOST_CHUNKS,
        "secondary_tiers": [{"type": "kvview", **tier}],
    }
    parallel = {
        **dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), 1),
        **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), 1),
        **dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), 1),
        **dict.fromkeys(("rank", "data_parallel_index", "data_parallel_rank"), 0),
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": True,
    }
    if tier_seam().config_objects:
        from vllm.v1.kv_offload import config

        made = make_known(
            config.OffloadingConfig,
            groups=(
                make_known(
                    config.OffloadingGroupConfig,
                    tokens_per_block=16,
                    layer_names=("l0",),
                    group_id=0,
                ),
            ),
            worker_kv_bytes_per_block=PAGE,
            enable_kv_cache_events=False,
            extra_config=extra,
            engine_id=engine,
            model=make_known(config.OffloadingModelConfig, name="m", dtype="bfloat16"),
            cache=make_known(config.OffloadingCacheConfig, tokens_per_hash=16, blocks_per_chunk=1),
            parallel=make_known(config.OffloadingParallelConfig, **parallel),
        )
        return OffloadingSpecFactory.create_spec(made)
    from vllm.v1 import kv_cache_interface as interface

    spec = make_known(
        interface.FullAttentionSpec,
        block_size=16,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.bfloat16,
    )
    caches = interface.KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[interface.KVCacheTensor(size=PAGE * 4, shared_by=["l0"])],
        kv_cache_groups=[interface.KVCacheGroupSpec(["l0"], spec)],
    )
    config = types.SimpleNamespace(
        kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config=extra, engine_id=engine),
        kv_events_config=None,
        instance_id=engine,
        parallel_config=types.SimpleNamespace(**parallel),
        cache_config=types.SimpleNamespace(
            block_size=16,
            hash_block_size=None,
            cache_dtype="auto",
            enable_prefix_caching=True,
            prefix_match_unit=None,
        ),
        model_config=types.SimpleNamespace(model="m", dtype=torch.bfloat16),
    )
    return OffloadingSpecFactory.create_spec(config, caches)


class Tiering:
    """The release's tiering manager over its host pages, driven as a scheduler does."""

    def __init__(self, **tier: Any) -> None:
        from vllm.v1.kv_offload import base

        self.base: Any = base
        self.manager = make_spec(tier).get_manager()
        self.tier: KVViewTier = self.manager.secondary_tiers[0]
        view = self.manager.primary_tier.get_kv_memoryview()
        self.row_bytes, self.memory = view.strides[0], view.cast("B")
        self._request = 0

    def key(self, number: int) -> Any:
        return self.base.make_offload_key(bytes([number]) * 32, 0)

    def context(self) -> Any:
        self._request += 1
        context = self.base.ReqContext(req_id=str(self._request))
        self._tell("on_new_request", context)
        return context

    def page(self, place: int) -> memoryview:
        page: memoryview = self.memory[place * self.row_bytes :][:PAGE]
        return page

    def end_step(self) -> None:
        kind = getattr(self.base, "ScheduleEndContext", None)
        if kind is None:
            self._tell("on_schedule_end")
        else:
            self._tell("on_schedule_end", kind(new_req_ids=(), preempted_req_ids=()))
        list(self.manager.take_events())

    def settle(self) -> None:
        """Until no job is in flight."""
        for _ in range(5000):
            self.end_step()
            if not self.tier.has_pending_work():
                return
            time.sleep(0.001)
        raise AssertionError("a job is never reported")

    def store(self, numbers: Iterable[int]) -> bool:
        """What a request computed goes to the host, and down."""
        context, keys = self.context(), [self.key(number) for number in numbers]
        prepared = self.manager.prepare_store(keys, context)
        if prepared is not None and prepared.keys_to_store:
            for key, place in zip(
                prepared.keys_to_store, self._places(prepared.store_spec), strict=True
            ):
                self.page(place)[:] = bytes_of(bytes(key))
            self.manager.complete_store(list(prepared.keys_to_store), context, True)
        self._tell("on_request_finished", context)
        self.settle()
        return prepared is not None

    def fetch(self, numbers: Iterable[int]) -> tuple[int, int]:
        """Look up until it is known, and load: how many were hit, and how many are exact."""
        context, keys = self.context(), [self.key(number) for number in numbers]
        answers: list[str] = []
        for _ in range(5000):
            answers = [str(self.manager.lookup(key, context)) for key in keys]
            self.end_step()
            known = [answer.rpartition(".")[2] for answer in answers]
            if all(answer in ("HIT", "MISS", "True", "False") for answer in known):
                break
            time.sleep(0.001)
        else:
            raise AssertionError(f"lookups are never answered: {answers}")
        hits = [key for key, answer in zip(keys, known, strict=True) if answer in ("HIT", "True")]
        exact = 0
        if hits:
            places = self._places(self.manager.prepare_load(hits, context))
            pairs = zip(hits, places, strict=True)
            exact = sum(self.page(place) == bytes_of(bytes(key)) for key, place in pairs)
            self.manager.complete_load(hits, context)
        self._tell("on_request_finished", context)
        self.settle()
        return len(hits), exact

    def close(self) -> None:
        self.memory.release()
        self.manager.shutdown()

    def _places(self, spec: Any) -> list[int]:
        return [int(place) for place in getattr(spec, "chunk_ids", getattr(spec, "block_ids", ()))]

    def _tell(self, hook: str, *args: Any) -> None:
        getattr(self.manager, hook, lambda *_: None)(*args)


def bytes_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(PAGE)


@pytest.fixture
def tiering(tmp_path: Path) -> Iterator[Tiering]:
    made = Tiering(store=FILES, options={"root": str(tmp_path)}, weights="1")
    yield made
    made.close()


def test_what_was_evicted_from_the_host_comes_back_byte_for_byte(tiering: Tiering) -> None:
    assert tiering.store(range(8))
    assert tiering.store(range(8, 16))  # the host has room for eight
    assert tiering.fetch(range(8)) == (8, 8)
    assert tiering.fetch(range(8, 16)) == (8, 8)
    assert tiering.fetch(range(40, 44)) == (0, 0)
    assert tiering.tier.guard.stats.puts == 16


def test_a_damaged_file_is_a_miss_and_is_stored_again(tiering: Tiering, tmp_path: Path) -> None:
    assert tiering.store(range(8))
    assert tiering.store(range(8, 16))
    (path,) = tmp_path.rglob((bytes(tiering.key(3))).hex())
    content = bytearray(path.read_bytes())
    content[5000:9096] = bytes(4096)
    path.write_bytes(content)
    for _ in range(2):
        hit, exact = tiering.fetch(range(8))
        assert hit == exact < 8
    assert tiering.tier.guard.stats.damaged == 1
    tiering.store([3])
    tiering.store(range(20, 28))
    assert tiering.fetch([3]) == (1, 1)


def test_another_process_finds_it_and_other_weights_do_not(tmp_path: Path) -> None:
    for weights, found in (("1", (0, 0)), ("1", (8, 8)), ("2", (0, 0))):
        tiering = Tiering(store=FILES, options={"root": str(tmp_path)}, weights=weights)
        assert tiering.fetch(range(8)) == found
        tiering.store(range(8))
        tiering.close()


@pytest.mark.parametrize(
    "fault",
    ["put raises", "get raises", "poll raises", "lookup raises", "put blocks", "lookup blocks",
     "never reports", "writes late", "reports twice", "too few flags", "lookup lies", "put lies",
     "flips a bit", "swaps keys", "is full"],
)  # fmt: skip
def test_vtier_2_a_faulty_store_raises_nothing_and_gives_no_wrong_bytes(fault: str) -> None:
    tiering = Tiering(
        store="kvview.testing.tier.faulty_store:FaultyStore",
        weights="1",
        deadline=0.2,
        lookup_deadline=0.1,
    )
    under: Any = tiering.tier.guard.store
    assert tiering.store(range(8))
    under.fault = fault
    tiering.store(range(8, 16))
    for numbers in (range(4), range(100, 103), range(12, 16)):
        hit, exact = tiering.fetch(numbers)
        assert hit == exact
    under.heal()
    tiering.close()


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ({}, "store: Field required"),
        ({"store": FILES}, "weights of 'm' are not known"),
        ({"store": FILES, "weights": "1", "rot": 1}, "rot: Extra inputs are not permitted"),
        ({"store": "examples/none.py:X", "weights": "1"}, "there is no file"),
        ({"store": "kvview:Namespace", "weights": "1"}, "has no 'Namespace'"),
        ({"store": "kvview.tier:Namespace", "weights": "1"}, "is no class of tier stores"),
    ],
)
def test_vtier_1_what_cannot_start_says_why(tier: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"secondary_tiers, type 'kvview': .*{said}"):
        make_spec(tier).get_manager()


def test_vtier_1_hashes_that_begin_at_random_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    spec = make_spec({"store": FILES, "options": {"root": str(tmp_path)}, "weights": "1"})
    if tier_seam().fixed_hash_root:
        spec.get_manager().shutdown()
        return
    with pytest.raises(ConfigError, match=r"VTIER-1: .*: export PYTHONHASHSEED=0"):
        spec.get_manager()


def test_vtier_1_a_root_that_turns_out_to_be_random_takes_the_tier_out_of_use(
    tiering: Tiering, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not tier_seam().fixed_hash_root:
        pytest.skip("such a server does not start with the tier (before 0.29.0)")
    from vllm.v1.core import kv_cache_utils

    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.delenv("PYTHONHASHSEED")
    (xxhash, *_) = kv_cache_utils._NON_CRYPTO_HASH_FUNCTIONS
    kv_cache_utils.init_none_hash(xxhash)
    assert tiering.store(range(8))
    assert tiering.store(range(8, 16))
    assert tiering.fetch(range(8)) == (0, 0)
    assert caplog.text.count("VTIER-1: the block hashes of this server begin at random") == 1


def test_vtier_2_a_job_that_is_refused_is_reported(tiering: Tiering) -> None:
    """A store takes no key of over 100 bytes; vLLM waits for every job that it gave."""
    job = make_tier_job(900, [tiering.base.make_offload_key(b"k" * 150, 0)], [0], is_load=False)
    tiering.tier.submit_store(job)
    for _ in range(5000):
        if results := list(tiering.tier.get_finished_jobs()):
            break
        time.sleep(0.001)
    assert [(result.job_id, result.success) for result in results] == [(900, False)]
    assert not tiering.tier.has_pending_work()
