"""A kvview store below vLLM's own tiering manager, on the real classes of the release."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvview_vllm.releases.compat.tiers import has_tiers, make_tier_job, tier_seam

if not has_tiers():
    pytest.skip("this release has no tiers below the host (0.22.0)", allow_module_level=True)

from kvview import ConfigError
from kvview.tier import Namespace
from kvview_vllm.doctor import diagnose, tier_trial
from kvview_vllm.releases.build.tier_specs import make_tiering_spec
from kvview_vllm.tier import KVViewTier

PAGE = 65_536
NUM_HOST_CHUNKS = 8
FILES = "examples/folder_store.py:FolderConnector"
FAULTY = "tests.tier.faulty_store:FaultyStore"


@pytest.fixture(autouse=True)
def _fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def make_spec(tier: dict[str, Any], *, publishes_events: bool = False) -> Any:
    """Make a ``KVViewTieringSpec`` as vLLM does from a user's configuration."""
    extra = configured(tier) | {"cpu_bytes_to_use": PAGE * NUM_HOST_CHUNKS}
    namespace = Namespace("m", "any weights", kv_dtype="bfloat16")
    return make_tiering_spec(extra, namespace, PAGE, publishes_events=publishes_events)


def configured(tier: dict[str, Any]) -> dict[str, Any]:
    """Return the ``kv_connector_extra_config`` of a tier."""
    return {
        "spec_name": "KVViewTieringSpec",
        "spec_module_path": "kvview_vllm.tier",
        "secondary_tiers": [{"type": "kvview", **tier}],
    }


class Tiering:
    """The release's tiering manager over its host pages, called as a scheduler does."""

    def __init__(self, *, publishes_events: bool = False, **tier: Any) -> None:
        from vllm.v1.kv_offload import base

        self.base: Any = base
        self.manager = make_spec(tier, publishes_events=publishes_events).get_manager()
        self.tier: KVViewTier = self.manager.secondary_tiers[0]
        view = self.manager.primary_tier.get_kv_memoryview()
        self.row_bytes, self.memory = view.strides[0], view.cast("B")
        self._request = 0
        self.events: list[Any] = []

    def key(self, number: int) -> Any:
        return self.base.make_offload_key(bytes([number]) * 32, 0)

    def context(self) -> Any:
        self._request += 1
        context = self.base.ReqContext(req_id=str(self._request))
        self._call("on_new_request", context)
        return context

    def page(self, place: int) -> memoryview:
        page: memoryview = self.memory[place * self.row_bytes :][:PAGE]
        return page

    def end_step(self) -> None:
        kind = getattr(self.base, "ScheduleEndContext", None)
        if kind is None:
            self._call("on_schedule_end")
        else:
            self._call("on_schedule_end", kind(new_req_ids=(), preempted_req_ids=()))
        self.events += self.manager.take_events()

    def settle(self) -> None:
        """Step until no job is in flight."""
        for _ in range(5000):
            self.end_step()
            if not self.tier.has_pending_work():
                return
            time.sleep(0.001)
        raise AssertionError("a job is never reported")

    def store(self, numbers: Iterable[int]) -> bool:
        """Store keys on the host, and in the tier below."""
        context, keys = self.context(), [self.key(number) for number in numbers]
        prepared = self.manager.prepare_store(keys, context)
        if prepared is not None and prepared.keys_to_store:
            for key, place in zip(
                prepared.keys_to_store, self._places(prepared.store_spec), strict=True
            ):
                self.page(place)[:] = bytes_of(bytes(key))
            self.manager.complete_store(list(prepared.keys_to_store), context, True)
        self._call("on_request_finished", context)
        self.settle()
        return prepared is not None

    def fetch(self, numbers: Iterable[int]) -> tuple[int, int]:
        """Look keys up and load the hits; return the numbers of hits and of exact pages."""
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
            raise AssertionError(f"lookups have no result: {answers}")
        hits = [key for key, answer in zip(keys, known, strict=True) if answer in ("HIT", "True")]
        exact = 0
        if hits:
            places = self._places(self.manager.prepare_load(hits, context))
            pairs = zip(hits, places, strict=True)
            exact = sum(self.page(place) == bytes_of(bytes(key)) for key, place in pairs)
            self.manager.complete_load(hits, context)
        self._call("on_request_finished", context)
        self.settle()
        return len(hits), exact

    def close(self) -> None:
        self.memory.release()
        self.manager.shutdown()

    def _places(self, spec: Any) -> list[int]:
        return [int(place) for place in getattr(spec, "chunk_ids", getattr(spec, "block_ids", ()))]

    def _call(self, hook: str, *args: Any) -> None:
        getattr(self.manager, hook, lambda *_: None)(*args)


def bytes_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(PAGE)


@pytest.fixture
def tiering(tmp_path: Path) -> Iterator[Tiering]:
    made = Tiering(store=FILES, options={"root": str(tmp_path)}, weights="1")
    yield made
    made.close()


def test_pages_evicted_from_the_host_are_loaded_exactly(tiering: Tiering) -> None:
    assert tiering.store(range(8))
    assert tiering.store(range(8, 16))  # the host holds eight
    assert tiering.fetch(range(8)) == (8, 8)
    assert tiering.fetch(range(8, 16)) == (8, 8)
    assert tiering.fetch(range(40, 44)) == (0, 0)
    assert tiering.tier.guard.stats.puts == 16


def test_no_thread_of_the_manager_polls_the_tier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not even in a release that polls every tier that does not refuse."""
    base = import_module("vllm.v1.kv_offload.tiering.base").SecondaryTierManager
    if not hasattr(base, "tolerates_off_thread_polling"):
        pytest.skip("no manager polls before 0.33")
    monkeypatch.setattr(base, "tolerates_off_thread_polling", True)
    made = Tiering(store=FILES, options={"root": str(tmp_path)}, weights="1")
    threads = [thread.name for thread in threading.enumerate()]
    made.close()
    assert [name for name in threads if "poll" in name] == []


def test_another_process_finds_pages_of_the_same_weights_only(tmp_path: Path) -> None:
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
        store=FAULTY,
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


def test_vtier_1_a_random_hash_root_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    spec = make_spec({"store": FILES, "options": {"root": str(tmp_path)}, "weights": "1"})
    if tier_seam().fixed_hash_root:
        spec.get_manager().shutdown()
        return
    with pytest.raises(ConfigError, match=r"VTIER-1: .*: export PYTHONHASHSEED=0"):
        spec.get_manager()


def test_vtier_1_a_hash_root_that_turns_out_random_disables_the_tier(
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
    assert caplog.text.count("VTIER-1: the block hashes of this server start at random") == 1


def test_vtier_2_a_refused_job_is_reported(tiering: Tiering) -> None:
    """A store refuses keys of over 100 bytes; vLLM waits for every job that it submitted."""
    job = make_tier_job(900, [tiering.base.make_offload_key(b"k" * 150, 0)], [0], is_load=False)
    tiering.tier.submit_store(job)
    for _ in range(5000):
        if results := list(tiering.tier.get_finished_jobs()):
            break
        time.sleep(0.001)
    assert [(result.job_id, result.success) for result in results] == [(900, False)]
    assert not tiering.tier.has_pending_work()


# --- events ---


def held_of(events: list[Any], medium: str = "STORAGE") -> set[bytes]:
    """Return the keys that events of the tier advertise, and check their order (EVENT-1)."""
    held: set[bytes] = set()
    for event in events:
        if getattr(event.medium, "value", event.medium) != medium:
            continue
        for key in map(bytes, event.keys):
            assert (key in held) == event.removed, "two events in a row store or remove a key"
            (held.discard if event.removed else held.add)(key)
    return held


@pytest.fixture
def with_events(tmp_path: Path) -> Iterator[Tiering]:
    made = Tiering(
        publishes_events=True,
        store="kvview_reference.tier:FileStore",
        options={"root": str(tmp_path), "max_bytes": 12 * (PAGE + 1024), "threads": 1},
        weights="1",
    )
    yield made
    made.close()


def test_vtier_3_events_advertise_stored_keys_and_remove_evicted_ones(
    with_events: Tiering, tmp_path: Path
) -> None:
    keys = [bytes(with_events.key(number)) for number in range(16)]
    assert with_events.store(range(8))
    assert held_of(with_events.events) == {*keys[:8]}
    assert with_events.store(range(8, 16))
    there = {key for key in keys if [*tmp_path.rglob(key.hex())]}
    assert 8 <= len(there) <= 12
    assert held_of(with_events.events) == there
    assert held_of(with_events.events, "CPU") == {*keys[8:]}


def test_no_events_are_collected_unless_the_engine_publishes_them(tiering: Tiering) -> None:
    assert tiering.store(range(8))
    assert tiering.events == []
    assert tiering.tier._events is None


# --- metrics ---


def test_counters_are_among_vllms_own_metrics(tiering: Tiering) -> None:
    if not tier_seam().tier_metrics:
        pytest.skip("vLLM reads the metrics of tiers since 0.25")
    assert tiering.store(range(8))
    assert tiering.store(range(8, 16))
    assert tiering.fetch(range(8)) == (8, 8)
    prometheus_client: Any = import_module("prometheus_client")
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics

    stats = tiering.manager.get_stats()
    assert tiering.tier.get_stats() is None, "everything was reported"
    assert stats.reduce()[f"vllm:kvview_tier_puts:{(FILES,)}"] == 16
    extra = configured({})
    registry = prometheus_client.CollectorRegistry()
    kinds = {
        kind: partial(_made, kind, registry)
        for kind in (
            prometheus_client.Counter,
            prometheus_client.Gauge,
            prometheus_client.Histogram,
        )
    }
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="OffloadingConnector", kv_connector_extra_config=extra
        )
    )
    front: Any = metrics.OffloadPromMetrics(config, kinds, ["model_name"], {0: ["m"]})
    front.observe(stats.data)
    labels = {"model_name": "m", "store": FILES}
    for name, value in (("puts_total", 16), ("gets_total", 8), ("in_use", 1)):
        assert registry.get_sample_value(f"vllm:kvview_tier_{name}", labels) == value, name
    assert tiering.tier.get_stats() is None
    tiering.tier.guard.close()
    stats = tiering.tier.get_stats()
    front.observe(stats.data)
    assert registry.get_sample_value("vllm:kvview_tier_in_use", labels) == 0


def _made(kind: Any, registry: Any, **given: Any) -> Any:
    if kind.__name__ != "Gauge":
        given.pop("multiprocess_mode", None)
    return kind(registry=registry, **given)


# --- doctor ---


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({}, "store: Field required"),
        ({"store": FILES}, "weights of 'm' are unknown"),
        ({"store": FILES, "weights": "1"}, ""),  # without a root
        ({"store": FILES, "weights": "1", "rot": 1}, "rot: Extra inputs are not permitted"),
        ({"store": "examples/none.py:X", "weights": "1"}, "there is no file"),
        ({"store": "kvview:Namespace", "weights": "1"}, "has no 'Namespace'"),
        ({"store": "kvview.tier:Namespace", "weights": "1"}, "is not a class of tier stores"),
        (
            {
                "store": "kvview_reference.tier:FileStore",
                "weights": "1",
                "options": {"root": "/dev/null/x"},
            },
            "",
        ),
        ({"store": FAULTY, "weights": "1", "deadline": -1}, ""),
    ],
)
def test_vtier_1_a_wrong_setting_is_an_error_at_start(tier: dict[str, Any], message: str) -> None:
    with pytest.raises(
        ConfigError, match=f"secondary_tiers, type 'kvview': .*{message}" if message else None
    ):
        make_spec(tier).get_manager()


def test_doctor_needs_no_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    assert diagnose().is_healthy


class ReversesPages(tier_trial.MemoryStore):
    """Loads the bytes of a page in reverse order."""

    def write(self, key: bytes, page: memoryview, /) -> bool:
        return super().write(key, memoryview(bytes(reversed(bytes(page)))))


def test_doctor_sees_a_store_that_corrupts_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "tests.vllm.test_tiers:ReversesPages"
    monkeypatch.setitem(tier_trial._TIER["secondary_tiers"][0], "store", target)
    assert tier_trial.try_tier() == "a page that was stored cannot be loaded"
