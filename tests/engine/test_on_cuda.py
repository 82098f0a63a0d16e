"""Connectors on a real GPU: every step's kernels end long after the engine has launched them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvview import CacheGeometry, Connector, ConnectorConfig, FullAttention, SlidingWindow
from kvview.targets import load_connector
from kvview_reference.engine import Engine
from kvview_reference.engine.request import Request, chain_hashes
from kvview_reference.engine.stats import EngineStats
from kvview_reference.transfer.host_pages import HostPages

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EXAMPLES = Path(__file__).parents[2] / "examples"
FULL = CacheGeometry.single(4)
HYBRID = CacheGeometry(4, 4, (FullAttention(4), SlidingWindow(4, 12)))
SLOW = 40_000_000  # clock cycles of a GPU, about 20 ms
STORE = "kvview_reference.store_connector:StoreConnector"
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "memory": (STORE, {"cpu_blocks": 200}),
    "eager": (STORE, {"cpu_blocks": 200, "mode": "eager"}),
    "compressed": ("compressed_memory.py:CompressedConnector", {"cpu_bytes": 1 << 20}),
    "folder": ("folder_store.py:FolderConnector", {"root": "", "store_blocks": 200}),
    "two levels": ("two_levels.py:TwoLevelConnector", {"root": "", "cpu_blocks": 30}),
}


def play(connector: Connector, geometry: CacheGeometry, num_layers: int = 2) -> EngineStats:
    """Run prompts that share their first blocks, more of them than the pool has room for."""
    with torch.inference_mode():  # as engines allocate their KV caches
        engine = Engine(
            geometry,
            connector,
            num_gpu_blocks=80,
            page_bytes=256,  # larger ones would make the engine wait for the kernels
            num_layers=num_layers,
            max_running=4,
            verify_hits=False,  # because the engine would wait for the kernels
            device="cuda",
        )
    dice = random.Random(0)
    for number in range(60):
        family, num_blocks = dice.randrange(8), dice.randrange(4, 16)
        hashes = chain_hashes(f"{family}.{i}" for i in range(num_blocks))
        engine.add_request(Request(str(number), len(hashes) * 4, 4, 4, hashes))
        if number % 20 == 19:  # a later part may load the blocks of an earlier one
            while engine.has_work():
                with torch.inference_mode():
                    torch.cuda._sleep(SLOW)  # type: ignore[no-untyped-call]
                    engine.step()
    assert engine.shutdown() == {}
    return engine.stats


@pytest.mark.parametrize("geometry", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("name", TARGETS)
def test_no_byte_is_wrong(name: str, geometry: CacheGeometry, tmp_path: Path) -> None:
    target, options = TARGETS[name]
    given = {k: v or str(tmp_path) for k, v in options.items()}
    path = str(EXAMPLES / target) if ".py:" in target else target
    stats = play(load_connector(path)(ConnectorConfig(geometry, given)), geometry)
    assert stats.first_failure is None
    assert stats.loaded_blocks > 0
    assert stats.mismatches == 0


def test_a_copy_that_does_not_wait_for_the_kernels_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HostPages, "mark_compute", lambda self: None)
    connector = load_connector(str(EXAMPLES / "compressed_memory.py:CompressedConnector"))
    config = ConnectorConfig(FULL, {"cpu_bytes": 1 << 20, "mode": "eager"})
    assert play(connector(config), FULL).mismatches > 0
