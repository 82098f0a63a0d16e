"""The seams of whichever vLLM can be imported, forks of it, and what a later one renames."""

from __future__ import annotations

import enum
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from click.testing import CliRunner

from kvview import ConfigError, UnsupportedEngineError
from kvview_vllm.doctor import diagnose
from kvview_vllm.doctor.command import doctor
from kvview_vllm.releases import (
    NEWEST_TESTED,
    TESTED,
    Difference,
    differences,
    engine_version,
    installed,
    is_newer,
    is_tested,
    probe_connector,
    probe_offloading,
    probe_pool,
    reading,
    require_concrete,
)
from kvview_vllm.releases.beyond import KNOWN
from kvview_vllm.releases.calls import make_block_pool, make_cpu_manager
from kvview_vllm.releases.probes import ConnectorSurface
from kvview_vllm.releases.release import ConnectorSeam, Seam, find_class
from kvview_vllm.releases.shapes import SHAPES, check_shapes, shape_of
from kvview_vllm.releases.versions import number

vllm = pytest.importorskip(  # a submodule: this very folder is named vllm
    "vllm.version",
    reason="needs vLLM's Python sources: tests/vllm/sources.py",
    exc_type=ImportError,
)


BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


@pytest.fixture
def surface() -> ConnectorSurface:
    return ConnectorSurface.installed()


def has(name: str) -> bool:
    (found,) = (each for each in differences() if each.name == name)
    return found.is_in(engine_version())


SEAMS: dict[str, Callable[[], Seam]] = {
    "pool": lambda: probe_pool(make_block_pool(4)),
    "binding": lambda: installed().binding,
    "geometry": lambda: installed().geometry,
    "offloading": lambda: installed().offloading,
    "offloading, of a manager": lambda: probe_offloading(make_cpu_manager(1)),
    "connector": lambda: installed().connector,
}


@pytest.mark.parametrize("name", SEAMS)
def test_differences_are_where_the_table_says(name: str) -> None:
    if not re.match(r"\d+\.\d+\.\d+", vllm.__version__):
        pytest.skip(f"no release: {vllm.__version__}")
    found = SEAMS[name]()
    assert {each.name for each in found.differences() if vars(found)[each.name]} == {
        each.name for each in found.differences() if each.is_in(engine_version())
    }


def test_a_release_is_probed_once() -> None:
    assert installed() is installed()
    assert installed().connector is installed().connector


def test_the_table_is_complete() -> None:
    table = differences()
    assert len({each.name for each in table}) == len(table) > 30
    for each in table:
        assert isinstance(each, Difference)
        assert each.description
        assert each.source
        assert is_tested(each.first_release)
        assert is_tested(each.last_release or NEWEST_TESTED)


@pytest.mark.parametrize(
    ("version", "tested", "newer"),
    [
        (NEWEST_TESTED, True, False),
        (f"{NEWEST_TESTED}+cpu", True, False),
        (f"{NEWEST_TESTED.rpartition('.')[0]}.99", True, False),
        # A nightly: the next release's shapes.
        (f"{NEWEST_TESTED.rpartition('.')[0]}.99rc1.dev211+g0123abc", False, True),
        ("0.32.1rc1.dev7+g0123abc", True, False),
        ("0.99.0", False, True),
        ("1.0.0", False, True),
        ("0.10.2", False, False),
        ("dev", False, False),
    ],
)
def test_what_a_version_string_says(version: str, tested: bool, newer: bool) -> None:
    assert (is_tested(version), is_newer(version)) == (tested, newer)


@pytest.mark.parametrize("seam", ["binding", "geometry", "offloading", "connector"])
def test_every_seam_has_the_gate(seam: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.99.0")
    with pytest.raises(UnsupportedEngineError, match=rf"^the {seam} seam .*KVVIEW_ALLOW_UNTESTED"):
        getattr(installed(), seam)


def refused(surface: ConnectorSurface) -> str:
    with pytest.raises(UnsupportedEngineError) as caught:
        probe_connector(surface)
    for part in ("connector seam", vllm.__version__, TESTED, "upgrade kvview"):
        assert part in str(caught.value)
    return str(caught.value)


def refused_by_shape() -> str:
    with pytest.raises(UnsupportedEngineError) as caught:
        check_shapes.__wrapped__("connector")
    return str(caught.value)


def test_a_method_with_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    base = import_module(BASE).KVConnectorBase_V1
    fork = lambda self, request, tokens, tier: None  # noqa: E731
    monkeypatch.setattr(base, "get_num_new_matched_tokens", fork)
    assert "get_num_new_matched_tokens (request, tokens, tier)" in refused_by_shape()


def test_a_method_that_must_be_written_is_refused(surface: ConnectorSurface) -> None:
    class Fork(surface.base):  # type: ignore[misc,name-defined]
        @abstractmethod
        def price_of_load(self) -> float: ...

    assert "requires price_of_load" in refused(replace(surface, base=Fork))


def test_a_method_that_must_be_written_is_refused_before_python_does() -> None:
    code = (
        "from abc import abstractmethod\n"
        "from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as Base\n"
        "Base.price_of_load = abstractmethod(lambda self: 0.0)\n"
        "Base.__abstractmethods__ |= {'price_of_load'}\n"
        "try: import kvview_vllm.connector\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "UnsupportedEngineError the connector seam" in done.stdout
    assert "requires price_of_load" in done.stdout


@pytest.mark.parametrize(
    ("module", "kind", "name"),
    [
        ("vllm.v1.core.sched.output", "SchedulerOutput", "num_scheduled_tokens"),
        ("vllm.v1.core.sched.output", "CachedRequestData", "new_block_ids"),
        ("vllm.v1.outputs", "KVConnectorOutput", "finished_recving"),
    ],
)
def test_a_field_that_is_gone_is_refused(
    module: str, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = getattr(import_module(module), kind)
    monkeypatch.delitem(fields.__annotations__, name)
    monkeypatch.delattr(fields, name, raising=False)
    assert f"{kind}.{name} missing" in refused_by_shape()


@pytest.mark.parametrize(
    ("difference", "kind", "name"),
    [
        ("resumed_ids", "CachedRequestData", "resumed_req_ids"),
        ("preempted_ids", "SchedulerOutput", "preempted_req_ids"),
        ("worker_metadata", "KVConnectorOutput", "kv_connector_worker_meta"),
        ("failed_blocks", "KVConnectorOutput", "invalid_block_ids"),
        ("failed_requests", "KVConnectorOutput", "failed_recving"),
    ],
)
def test_what_is_renamed_is_not_an_older_release(
    surface: ConnectorSurface, difference: str, kind: str, name: str
) -> None:
    if not has(difference):
        pytest.skip("this release is older")
    fields = {**surface.fields, kind: surface.fields[kind] - {name} | {f"{name}_v2"}}
    assert f"({difference})" in refused(replace(surface, fields=fields))


def test_a_release_with_the_fix_of_a_defect_is_not_refused(
    surface: ConnectorSurface, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has("block_sizes_resolved"):
        pytest.skip("this release is older")
    manager = import_module("vllm.v1.core.single_type_kv_cache_manager").SingleTypeKVCacheManager
    fixed = lambda self, apply_admission_cap=False: 0  # noqa: E731
    monkeypatch.setattr(manager, "get_num_blocks_to_allocate", fixed)
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.20.1")
    assert not ConnectorSeam.found_on(surface).uncounted_window_blocks


def test_an_event_with_a_new_required_field_is_refused(surface: ConnectorSurface) -> None:
    struct: Any = import_module("msgspec").defstruct
    stored = struct("BlockStored", [("block_hashes", list), ("tenant", str), ("medium", str, "")])
    assert "BlockStored that requires tenant" in refused(replace(surface, events=(stored,)))


def test_hashes_under_a_new_name_are_not_a_pool_without(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has("several_hashes"):
        pytest.skip("this release is older")
    pool = make_block_pool(4)
    monkeypatch.delattr(pool, "cached_block_hashes_by_block")
    with pytest.raises(UnsupportedEngineError, match=r"pool seam .*\(several_hashes\)"):
        probe_pool(pool)


def test_a_queue_without_a_count_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_block_pool(4)
    monkeypatch.delattr(pool.free_block_queue, "num_free_blocks")
    with pytest.raises(UnsupportedEngineError, match="FreeKVCacheBlockQueue without num_free"):
        probe_pool(pool)


# --- the table of shapes, and the canaries ---


@pytest.mark.parametrize("seam", SHAPES)
def test_every_member_has_the_shape_of_the_table(seam: str) -> None:
    check_shapes(seam)


def test_every_method_that_overrides_one_of_vllm_is_in_the_table() -> None:
    from kvview_vllm.connector.connector import KVViewConnector
    from kvview_vllm.offloading.for_vllm import ManagerForVLLM

    known = {(row.owner.rpartition(":")[2], row.name) for rows in SHAPES.values() for row in rows}
    for ours, base in (
        (KVViewConnector, import_module(BASE).KVConnectorBase_V1),
        (ManagerForVLLM, find_class("OffloadingManager")),
    ):
        own = {name for kind in ours.__mro__ if "kvview" in kind.__module__ for name in vars(kind)}
        overridden = {n for n in own & set(vars(base)) if not n.startswith("_")}
        assert {n for n in overridden if (base.__name__, n) not in known} == set()


class Old(enum.Enum):
    ONE = 1


def _put(self: Any, key: bytes, *, sooner: bool = False) -> None: ...


_put.__annotations__["return"] = "typing.Optional[set[str]]"  # as some releases write it
_FIELDS = {"number": "Optional[int]", "names": "Union[dict[str, int], None]"}
Typed: Any = type(
    "Typed", (), {"__annotations__": _FIELDS, "put": _put, "size": property(lambda self: 0)}
)


@pytest.mark.parametrize(
    ("owner", "name", "shape"),
    [
        (Old, "ONE", "a member"),
        (Old, "TWO", None),
        (Typed, "number", "int | None"),
        (Typed, "names", "dict[str, int] | None"),
        (Typed, "size", "a property"),
        (Typed, "put", "(key, sooner=False) -> set[str] | None"),
        (Typed, "get", None),
        (None, "get", None),
    ],
)
def test_a_shape_is_said_in_one_way(owner: Any, name: str, shape: str | None) -> None:
    assert shape_of(owner, name) == shape


def test_whatever_fails_is_refused_in_one_line() -> None:
    with (
        pytest.raises(
            UnsupportedEngineError, match=r"pool seam .* a walk fails: ValueError: a b at"
        ) as caught,
        reading("pool", "a walk"),
    ):
        raise ValueError("a\nb")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="as it was"), reading("pool", "a walk"):
        raise ConfigError("as it was")


def test_a_class_of_ours_that_lacks_a_method_is_refused() -> None:
    class Base(ABC):
        @abstractmethod
        def price(self) -> int: ...

    class Ours(Base):
        pass

    with pytest.raises(UnsupportedEngineError, match="Base that requires price"):
        require_concrete("connector", Ours)


def test_doctor_plays_the_canaries_and_is_healthy() -> None:
    found = diagnose()
    assert found.is_healthy, [seam for seam in found.seams if not seam.fits]


CAME_WITH = {  # as vLLM's sources have them, release by release
    "TieringOffloadingSpec": (0, 22, 0),
    "cache_policy_module_path": (0, 27, 0),
    "SchedulerOutput.kv_connector_block_state": (0, 29, 0),
    "ReqContext.kv_hints": (0, 31, 0),
    "OffloadingManager.lock": (0, 33, 0),
    "tolerates_off_thread_polling": (0, 33, 0),
}


def test_doctor_names_what_this_release_has_beyond_the_contract() -> None:
    assert {each.name: number(each.since) for each, _ in KNOWN} == CAME_WITH
    here = number(engine_version()) or (0, 0, 0)
    expected = {name for name, since in CAME_WITH.items() if since <= here}
    assert {each.name for each in diagnose().beyond} == expected
    shown = CliRunner().invoke(doctor, env={"COLUMNS": "80"}).stdout
    seams = "".join(line.split("│")[1].strip() for line in shown.splitlines() if "│" in line)
    assert [name for name in expected if name not in seams] == []  # in full, to be looked for
