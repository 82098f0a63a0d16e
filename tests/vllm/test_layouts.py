"""KV survives bit by bit in every memory layout of the release; each wrong copy is detected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("vllm.v1.core.block_pool", reason="needs a vLLM release")

from kvview_vllm.connector import KVViewConnector
from kvview_vllm.partition.layouts import layout_pairs
from kvview_vllm.partition.matrix import Cell, PairOutcome, check_partition
from kvview_vllm.partition.pairs import Pair
from kvview_vllm.releases import installed
from kvview_vllm.releases.compat.calls import states_take_loads
from kvview_vllm.releases.compat.versions import vllm
from kvview_vllm.releases.cpu.worker_caches import allocate, can_allocate_states, layouts
from kvview_vllm.simulation.raw.worker import role as worker
from kvview_vllm.simulation.scheduler import cpu_scheduler
from tests.vllm.layout_connectors import FAULTS, Fault, InjectsFault
from tests.vllm.raw_connectors import HostConnector

cpu_scheduler.prepare()

CONNECTORS = "tests.vllm.layout_connectors"
KINDS = (
    "full attention and a window",
    "block sizes that differ by group",
    "pages with padding",
    "two head sizes in one group",
    "quantised and other layers",
    "MLA with an indexer",
    "MLA with four tokens a state",
    "Mamba states and full attention",
    "Mamba states without padding",
    "Mamba states alone",
    "FLASH_ATTN fp8",
    "TRITON_ATTN int8_per_token_head",
)
PAIRS = layout_pairs()
BASE = vllm("distributed.kv_transfer.kv_connector.v1.base").KVConnectorBase_V1
OFFLOADING = {"cpu_bytes_to_use": 2_000_000}
TIERING = OFFLOADING | {
    "spec_name": "KVViewTieringSpec",
    "spec_module_path": "kvview_vllm.tier",
    "secondary_tiers": [
        {
            "type": "kvview",
            "weights": "revision",
            "store": "kvview_reference.tier:FileStore",
            "options": {"root": "{tmp}"},
        }
    ],
}

has_layouts = pytest.mark.skipif(
    "LBHNC" not in layouts(), reason="layouts have an enumeration since vLLM 0.29"
)


def one_layout_of_each_kind() -> list[Pair]:
    """The first layout of each kind, and each layout of the first kind."""
    first: dict[Any, Pair] = {}
    for pair in PAIRS:
        first.setdefault(pair.first_engine.kind, pair)
    kind = PAIRS[0].first_engine.kind
    return list(
        dict.fromkeys([*first.values(), *(p for p in PAIRS if p.first_engine.kind == kind)])
    )


def each(name: str, pairs: Sequence[Pair]) -> Iterator[Cell]:
    options = {
        "connector": f"{CONNECTORS}:{name}",
        "options": {"cpu_blocks": 100},
        "contain_faults": False,
    }
    yield from check_partition(KVViewConnector, options, pairs)


def check(name: str, pairs: Sequence[Pair]) -> list[Cell]:
    return list(each(name, pairs))


@has_layouts
def test_every_kind_of_cache_is_enumerated() -> None:
    names = " / ".join(pair.name for pair in PAIRS)
    assert [kind for kind in KINDS if kind not in names] == []
    assert {pair.first_engine.layout for pair in PAIRS} == set(layouts())


def test_the_canonical_pages_are_exact_in_every_layout() -> None:
    wrong = [str(cell) for cell in check("RightConnector", PAIRS) if cell.outcome != "exact"]
    assert wrong == []


def test_a_write_elsewhere_is_detected_in_each_kind_and_each_layout() -> None:
    for cell in check("WritesElsewhere", one_layout_of_each_kind()):
        assert cell.outcome is PairOutcome.WRONG, cell
        assert "XFER-2" in cell.detail
        assert "layer" in cell.detail


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_wrong_copy_is_detected(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocates(*args: Any) -> Any:
        InjectsFault.caches = allocate(*args)
        return InjectsFault.caches

    monkeypatch.setattr(worker, "allocate", allocates)
    monkeypatch.setattr(InjectsFault, "fault", fault, raising=False)
    for cell in each("InjectsFault", one_layout_of_each_kind()):
        if InjectsFault.has_changed:
            assert cell.outcome is PairOutcome.WRONG, cell
            continue
        shape = InjectsFault.caches.slots[fault.layer][0].shape
        page = torch.arange(shape.numel()).reshape(shape)
        assert torch.equal(fault.change(page, ~page), page), cell  # one head, or one state
        assert cell.outcome is PairOutcome.EXACT, cell


@pytest.mark.skipif(
    not hasattr(BASE, "register_cross_layers_kv_cache") or can_allocate_states(),
    reason="one tensor has the blocks of all layers from 0.12 to 0.28",
)
def test_blocks_of_all_layers_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 0.18 vLLM passes the tensor under a name that no KV-cache group has."""
    made = []

    def allocates(*args: Any) -> Any:
        made.append(allocate(*args))
        return made[-1]

    monkeypatch.setattr(worker, "allocate", allocates)
    module = vllm("distributed.kv_transfer.kv_connector.v1.offloading_connector")
    kind = PAIRS[0].first_engine.kind
    pairs = [pair for pair in PAIRS if pair.first_engine.kind == kind]
    cells = check_partition(module.OffloadingConnector, OFFLOADING, pairs)
    # Up to 0.24 a stand-in makes the copies, which is neither credited nor blamed.
    assert {cell.outcome for cell in cells} <= {PairOutcome.EXACT, PairOutcome.NOT_CHECKED}
    assert all(caches.of_all_layers for caches in made)


@pytest.mark.skipif(
    not installed().geometry.mamba_cache_modes or not states_take_loads(),
    reason="requests with Mamba states load since vLLM 0.23",
)
def test_states_of_mamba_are_enumerated() -> None:
    names = " / ".join(pair.name for pair in PAIRS)
    assert "Mamba states and full attention" in names
    assert "Mamba states alone" in names


@has_layouts
@pytest.mark.parametrize(
    ("options", "expected"),
    [(OFFLOADING, PairOutcome.WRONG), (TIERING, PairOutcome.REFUSED)],
    ids=["vLLM's spec", "kvview's spec"],
)
def test_the_offloading_connector_passes_wrong_pages_in_some_layouts(
    options: dict[str, Any], expected: PairOutcome
) -> None:
    """Two defects of vLLM, which its own spec does not notice (PAGE-3)."""
    module = vllm("distributed.kv_transfer.kv_connector.v1.offloading_connector")
    kind = str(PAIRS[0].first_engine.kind)
    wrong = {
        f"{kind}, LHBNC",
        *(f"Mamba states alone, {layout}" for layout in ("BLHNC", "BLNHC", "BHLNC")),
        *(f"Mamba states without padding, {layout}" for layout in ("BLHNC", "BLNHC")),
    }
    pairs = [
        pair
        for pair in PAIRS
        if pair.name.startswith((kind, "Mamba states alone", "Mamba states wi"))
    ]
    cells = check_partition(module.OffloadingConnector, options, pairs)
    outcomes = {cell.pair.name: cell.outcome for cell in cells}
    assert {name for name in outcomes if outcomes[name] is expected} == wrong
    assert {outcomes[name] for name in outcomes if name not in wrong} == {PairOutcome.EXACT}


class NotesTheMetadata(HostConnector):
    """Notes the class of the metadata of each layer, on which layer-wise connectors branch."""

    seen: ClassVar[set[str]] = set()

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        self.seen.add(type(attn_metadata).__name__)
        assert len(attn_metadata.slot_mapping)


def test_layers_get_the_metadata_of_their_backend() -> None:
    classes = {"FLASH_ATTN": "FlashAttentionMetadata", "TRITON_ATTN": "TritonAttentionMetadata"}
    pairs = {pair.name.split(",")[0].split()[0]: pair for pair in PAIRS}
    backends = classes.keys() & pairs.keys()
    assert "FLASH_ATTN" in backends
    list(check_partition(NotesTheMetadata, {}, [pairs[backend] for backend in backends]))
    assert NotesTheMetadata.seen == {classes[backend] for backend in backends}
