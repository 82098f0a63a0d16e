"""Changes of behaviour planted into copies of vLLM: which does the upstream job see?

    python tests/vllm/upstream_faults.py [NAME ...]

Each is one edit of the newest release's sources (links, but for the file that changes), in
which ``examples/upstream/test_kv_connectors.py`` is run. None changes a signature. One that
stays green is missed; so is one that does not get as far as the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from drift_edits import (  # type: ignore[import-not-found]
    CPU,
    OFFLOAD_SCHEDULER,
    POOL,
    SCHEDULER,
    Sources,
    swap,
)
from drifts import NEWEST, write_tree  # type: ignore[import-not-found]

from kvview_vllm.releases.sources import sources

_ROOT = Path(__file__).parents[2]
_JOB = _ROOT / "examples" / "upstream" / "test_kv_connectors.py"
_MULTI = "vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py"
_SIMPLE = "vllm/v1/simple_kv_offload/manager.py"
_LRU = "vllm/v1/kv_offload/cpu/policies/lru.py"

FAULTS = {
    "a hold of a free block leaves it in the free queue": swap(
        POOL,
        "self.free_block_queue.remove(block)\n            block.ref_cnt += 1",
        "block.ref_cnt += 1",
    ),
    "a block that is given out keeps its hash": swap(
        POOL,
        "for block in ret:\n                self._maybe_evict_cached_block(block)\n",
        "for block in ret:\n",
    ),
    "cached blocks are evicted before those without a hash": swap(
        POOL,
        "self.free_block_queue.append_n(blocks_to_evict_last)",
        "self.free_block_queue.prepend_n(blocks_to_evict_last)",
    ),
    "of the cached blocks freed together one is lost": swap(
        POOL,
        "self.free_block_queue.append_n(blocks_to_evict_last)",
        "self.free_block_queue.append_n(blocks_to_evict_last[1:] or blocks_to_evict_last)",
    ),
    "the prefix cache is reset while blocks are held": swap(
        POOL, "if num_used_blocks != 1:", "if num_used_blocks < 1:"
    ),
    "a store that was told as finished frees nothing": swap(
        SCHEDULER,
        'logger.debug("Finished sending KV transfer for request %s", req_id)\n'
        "            assert req_id in self.requests\n"
        "            self._free_blocks(self.requests[req_id])",
        'logger.debug("Finished sending KV transfer for request %s", req_id)\n'
        "            assert req_id in self.requests",
    ),
    "request_finished no longer keeps the blocks": swap(
        SCHEDULER,
        "delay_free_blocks |= connector_delay_free_blocks",
        "delay_free_blocks |= False",
    ),
    "an abort frees the blocks of a load in flight": swap(
        SCHEDULER,
        "and request.request_id not in self.finished_recving_kv_req_ids\n                )",
        "and False\n                )",
    ),
    "a connector is not told of what the GPU hits": swap(
        SCHEDULER,
        "request, block_aligned_local\n",
        "request, 0\n",
    ),
    "a preempted request counts as computed": swap(
        SCHEDULER,
        "request.status = RequestStatus.PREEMPTED\n        request.num_computed_tokens = 0\n",
        "request.status = RequestStatus.PREEMPTED\n"
        "        request.num_computed_tokens = min(16, request.num_computed_tokens)\n",
    ),
    "what was loaded is found on the GPU before it has arrived": swap(
        SCHEDULER,
        "request.num_computed_tokens = num_computed_tokens\n"
        "                    if self.aux_output_connector is not None:\n",
        "request.num_computed_tokens = num_computed_tokens\n"
        "                    self.kv_cache_manager.cache_blocks(request, num_computed_tokens)\n"
        "                    if self.aux_output_connector is not None:\n",
    ),
    "MultiConnector keeps the reports of its last child only": swap(
        _MULTI,
        "results.finished_recving.update(child_results.finished_recving)",
        "results.finished_recving = set(child_results.finished_recving)",
    ),
    "MultiConnector loads by the last child that has something": swap(
        _MULTI,
        "if to_return[0] == 0 and toks > 0:\n",
        "if toks > 0:\n                to_return = (toks, load_async)\n"
        "            if toks > 0 and i == 0:\n",
    ),
    "the manager evicts what was used last": swap(
        _LRU,
        "entry = heapq.heappop(self._heap)\n            if not self._is_current(entry):\n"
        "                continue\n            key = entry[1]\n            # Re-pinning",
        "self._heap.sort(reverse=True)\n            entry = self._heap.pop(0)\n"
        "            if not self._is_current(entry):\n"
        "                continue\n            key = entry[1]\n            # Re-pinning",
    ),
    "a failed store is found": swap(
        CPU,
        "        if success:\n            for key in keys:",
        "        if True:\n            for key in keys:",
    ),
    "an eviction is not told": swap(
        CPU,
        "        if stored_keys and self.events is not None:\n",
        "        if self.events is not None:\n"
        "            self.events = [event for event in self.events if not event.removed]\n"
        "        if stored_keys and self.events is not None:\n",
    ),
    "OffloadingConnector promises a chunk that is not there": swap(
        OFFLOAD_SCHEDULER,
        "req_status.update_num_hit_chunks(num_computed_tokens + (num_hit_tokens or 0))",
        "num_hit_tokens = num_hit_tokens and num_hit_tokens + 16\n"
        "        req_status.update_num_hit_chunks(num_computed_tokens + (num_hit_tokens or 0))",
    ),
    "OffloadingConnector looks up as if nothing were computed": swap(
        OFFLOAD_SCHEDULER,
        "req_status.num_locally_computed_tokens = num_computed_tokens\n\n        num_hit",
        "req_status.num_locally_computed_tokens = 0\n\n        num_hit",
    ),
    "SimpleCPUOffloadConnector forgets the end of a load": swap(
        _SIMPLE,
        "for req_id in list(connector_output.finished_recving or []):",
        "for req_id in list(connector_output.finished_recving or [])[:0]:",
    ),
    "SimpleCPUOffloadConnector never takes a store for done": swap(
        _SIMPLE,
        "if total >= self._expected_worker_count:",
        "if total > self._expected_worker_count:",
    ),
}


def run_in(folder: Path) -> tuple[bool, str]:
    """Whether the job is red there, and by which test."""
    paths = [str(_ROOT), str(_ROOT / "reference"), str(_ROOT / "adapters"), str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", str(_JOB)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    failed = re.search(r"^FAILED \S+::(.+?)( - |$)", done.stdout, re.MULTILINE)
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    return failed is not None, failed[1] if failed else last


def main() -> int:
    files = Sources(sources(NEWEST))
    names = [name for name in FAULTS if not sys.argv[1:] or any(a in name for a in sys.argv[1:])]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="kvview-upstream-") as scratch:
        for number, name in enumerate(names):
            changed: dict[str, str] = {}
            FAULTS[name](files, changed)
            folder = Path(scratch, str(number))
            write_tree(files.folder, folder, changed)
            is_seen, told = run_in(folder)
            missed += not is_seen
            print(f"{'seen' if is_seen else 'MISSED':7} {name}: {told}", flush=True)
    print(f"{len(names) - missed} of {len(names)} changes seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
