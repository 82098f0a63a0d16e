"""The seams of the vLLM release that can be imported: each is as the tables state.

Later releases are in ``test_drifts.py``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest
import vllm.version as vllm

from kvview import UnsupportedEngineError
from kvview_vllm.doctor import diagnose
from kvview_vllm.releases import (
    NEWEST_TESTED,
    Difference,
    differences,
    engine_version,
    installed,
    is_newer,
    is_tested,
    probe_pool,
)
from kvview_vllm.releases.compat import shapes
from kvview_vllm.releases.compat.calls import make_block_pool
from kvview_vllm.releases.compat.seams import ConnectorSeam, Seam
from kvview_vllm.releases.compat.shapes import SHAPES, check_shapes

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def has(name: str) -> bool:
    (found,) = (each for each in differences() if each.name == name)
    return found.is_in(engine_version())


SEAMS: dict[str, Callable[[], Seam]] = {
    "pool": lambda: probe_pool(make_block_pool(4)),
    "binding": lambda: installed().binding,
    "geometry": lambda: installed().geometry,
    "connector": lambda: installed().connector,
}


@pytest.mark.parametrize("name", SEAMS)
def test_differences_are_in_the_releases_of_the_table(name: str) -> None:
    if not re.match(r"\d+\.\d+\.\d+", vllm.__version__):
        pytest.skip(f"no release: {vllm.__version__}")
    found = SEAMS[name]()
    assert {each.name for each in found.differences() if vars(found)[each.name]} == {
        each.name for each in found.differences() if each.is_in(engine_version())
    }


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
def test_a_version_string_is_tested_or_newer(version: str, tested: bool, newer: bool) -> None:
    assert (is_tested(version), is_newer(version)) == (tested, newer)


@pytest.mark.parametrize("seam", SEAMS)
def test_every_seam_refuses_a_later_release_unless_it_is_allowed(
    seam: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_newest = engine_version().partition("+")[0] == NEWEST_TESTED
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.99.0")
    refused = rf"^the {seam.partition(',')[0]} seam .* 0\.99\.0.*KVVIEW_ALLOW_UNTESTED"
    with pytest.raises(UnsupportedEngineError, match=refused):
        SEAMS[seam]()
    monkeypatch.setenv("KVVIEW_ALLOW_UNTESTED_VLLM", "1")
    if not is_newest:
        return  # a feature of the newest release is missing, so it may have been renamed
    SEAMS[seam]()
    assert "outside the tested range" in caplog.text


def test_a_fork_with_the_fix_of_a_defect_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has("block_sizes_resolved"):
        pytest.skip("this release is older")
    manager = import_module("vllm.v1.core.single_type_kv_cache_manager").SingleTypeKVCacheManager
    fixed = lambda self, apply_admission_cap=False: 0  # noqa: E731
    monkeypatch.setattr(manager, "get_num_blocks_to_allocate", fixed)
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.20.1")
    assert not ConnectorSeam.found_on(
        import_module(BASE).KVConnectorBase_V1
    ).uncounted_window_blocks


# --- the table of shapes ---


@pytest.mark.parametrize("seam", SHAPES)
def test_every_member_has_the_shape_of_the_table(seam: str) -> None:
    check_shapes(seam)


@pytest.mark.parametrize("seam", SHAPES)
def test_every_missing_or_changed_member_is_refused(
    seam: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row for row in SHAPES[seam] if row.is_in(engine_version()) and row.name != "()"]
    for row in rows:
        monkeypatch.setattr(shapes, "SHAPES", {seam: [row]})
        for found in (None, "(another) -> shape") if row.shape else (None,):
            monkeypatch.setattr(shapes, "shape_of", lambda *_, found=found: found)
            with pytest.raises(UnsupportedEngineError, match=re.escape(f".{row.name} ")):
                check_shapes.__wrapped__(seam)


def test_a_shape_of_a_fork_is_refused_unless_the_user_allows_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [replace(row, shape="float") for row in SHAPES["geometry"] if row.name == "num_blocks"]
    monkeypatch.setattr(shapes, "SHAPES", {"geometry": rows})
    with pytest.raises(UnsupportedEngineError, match=r"num_blocks int; expected .* float"):
        check_shapes.__wrapped__("geometry")
    monkeypatch.setenv("KVVIEW_ALLOW_UNTESTED_VLLM", "1")
    check_shapes.__wrapped__("geometry")
    assert "so this vLLM is used nevertheless: the geometry seam" in caplog.text


def test_every_method_that_overrides_vllm_is_in_the_table() -> None:
    from kvview_vllm.connector.connector import KVViewConnector

    known = {(row.owner.rpartition(":")[2], row.name) for rows in SHAPES.values() for row in rows}
    base = import_module(BASE).KVConnectorBase_V1
    kinds = [kind for kind in KVViewConnector.__mro__ if "kvview" in kind.__module__]
    own = {name for kind in kinds for name in vars(kind)}
    overridden = {n for n in own & set(vars(base)) if not n.startswith("_")}
    assert {n for n in overridden if (base.__name__, n) not in known} == set()


def test_doctor_is_healthy() -> None:
    found = diagnose()
    assert found.is_healthy, [seam for seam in found.seams if not seam.fits]
