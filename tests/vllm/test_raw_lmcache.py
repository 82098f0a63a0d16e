"""LMCache's connector, unmodified; up to vLLM 0.25 with its own GPU connector on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvview_vllm.releases.compat.versions import engine_version

pytest.importorskip(
    "lmcache.v1.storage_backend",
    reason="needs LMCache and its imports",
    exc_type=ImportError,
)

pytest.importorskip("uvicorn", reason="needs the imports of LMCache's connector")
if not engine_version().startswith(("0.24.", "0.28.", "0.33.")):
    pytest.skip("LMCache 0.5.6 was tried with 0.24, 0.28 and 0.33", allow_module_level=True)

SETTINGS = {
    "LMCACHE_CHUNK_SIZE": "16",
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.05",
    "LMCACHE_LOG_LEVEL": "CRITICAL",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",
}
SCRIPT = """
import os, sys
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
from dataclasses import replace
from kvview.testing.connector import Reset, generate_scenario
from kvview_vllm.releases.compat.calls import gpus_use_runner_v2
from kvview_vllm.simulation.raw import RawRun

if "broken" in sys.argv:
    from lmcache.v1.gpu_connector import gpu_connectors
    from kvview_vllm.releases.cpu import lmcache_copies

    own, pages = gpu_connectors.device_ops.multi_layer_kv_transfer, lmcache_copies._pages
    gpu_connectors.device_ops.multi_layer_kv_transfer = (
        lambda keys, pointers, slots, device, size, *args, **options: own(
            keys, pointers, (slots + 16) % size, device, size, *args, **options
        )
    )
    lmcache_copies._pages = lambda *args: [p.roll(1, 0) for p in pages(*args)]
def scenario(seed):
    drawn = generate_scenario(seed)
    # Without resets, because LMCache keeps its KV, and V1 alone unless it is to be V2.
    events = tuple(one for one in drawn.events if not isinstance(one, Reset))
    return replace(drawn, events=events, other_runner=gpus_use_runner_v2() and "V2" not in sys.argv)

results = [RawRun(LMCacheConnectorV1, scenario(seed), {}).run() for seed in range(3)]
print([result.failure and result.failure.law for result in results])
print(sum(result.coverage["loads"] for result in results))
print(sorted(name for name in results[0].coverage if name.startswith("replaced")))
sys.stdout.flush()
os._exit(0)  # some of its threads never end
"""


def run(tmp_path: Path, *args: str) -> list[str]:
    script = tmp_path / "script.py"  # LMCache's threads outlive a run: a process of its own
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, *args],
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-3:]


def test_lmcaches_connector_is_clean_and_has_loaded(tmp_path: Path) -> None:
    laws, loads, replaced = run(tmp_path)
    assert laws == "[None, None, None]"
    assert int(loads) > 50
    if engine_version().startswith("0.24."):
        assert replaced == "[]"
    else:
        assert replaced == '["replaced: LMCache\'s GPU connector, for packed pages"]'


@pytest.mark.newest
def test_model_runner_v2_makes_it_skip_loads(tmp_path: Path) -> None:
    # LMCache 0.5.6 starts no load if the forward context has no attention metadata.
    laws, _, _ = run(tmp_path, "V2")
    assert laws.startswith("['XFER-1', 'XFER-1', ")


def test_a_misplaced_copy_is_seen(tmp_path: Path) -> None:
    laws, _, _ = run(tmp_path, "broken")
    assert laws == "['XFER-1', 'XFER-1', 'XFER-1']"
