"""The hits of the GPU's prefix cache and of a host tier for each request of a trace.

1. Requests are served one after another, by arrival. The GPU holds the most recently used blocks
   (LRU, which evicts chains from their tail). Blocks that follow in the prefix without a gap and
   are on the host are loaded; all other blocks are computed.
2. Every block of a request is offered to the host and counts as used on the host, hit or not, as in
   vLLM's connector. So the host also holds the blocks that the GPU holds.
3. A policy is run in the manager of the reference, with stores after each step of a chunked
   prefill. LRU needs no replay, because one pass over the trace gives the hits of every size.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvview import LookupResult, OffloadKey, ReqContext, make_offload_key
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.sizing.curves import Curve, Reach, hits_within, lru_curve, lru_reaches
from kvview_reference.sizing.references import References

STEP_BLOCKS = 128
"""Most blocks of one store, which are those that a step of a chunked prefill computes."""


@dataclass(frozen=True)
class HostTraffic:
    """Numbers of blocks that a host tier moves for each request.

    Args:
        loaded: Blocks loaded from the host, which are the host's hits.
        stored: Blocks stored to the host.
    """

    loaded: Sequence[int]
    stored: Sequence[int]


class Tiers:
    """A trace, a GPU of one size, and hosts of any size.

    Args:
        references: The trace.
        gpu_blocks: Blocks that the GPU's prefix cache may hold; 0 for no cache.

    Attributes:
        gpu_hits: Number of blocks that each request hits on the GPU, which does not depend on the
            host.
        curve: Hits of an LRU cache, by its size.
    """

    def __init__(self, references: References, gpu_blocks: int) -> None:
        self.references = references
        self.gpu_blocks = gpu_blocks
        self._reaches: list[list[Reach]] = list(lru_reaches(references))
        self.curve: Curve = lru_curve(self._reaches)
        self.gpu_hits = array("I", (hits_within(reaches, gpu_blocks) for reaches in self._reaches))
        self._keys: list[OffloadKey] = []

    def lru(self, host_blocks: int) -> HostTraffic:
        """Compute the traffic of an LRU host, without a replay."""
        hits = [hits_within(reaches, host_blocks) for reaches in self._reaches]
        requests = self.references.requests
        return HostTraffic(
            array("I", (max(0, hit - gpu) for hit, gpu in zip(hits, self.gpu_hits, strict=True))),
            array(
                "I",
                (min(r.num_blocks - h, host_blocks) for r, h in zip(requests, hits, strict=True)),
            ),
        )

    def replay(self, host_blocks: int, policy: str) -> HostTraffic:
        """Compute the traffic of a host under a policy, by its name.

        Raises:
            ConfigError: The policy is unknown.
        """
        # A host with room for every block evicts none, so more room changes nothing.
        size = min(host_blocks, self.references.num_blocks)
        if not size:
            none = array("I", bytes(4 * len(self.gpu_hits)))
            return HostTraffic(none, none)
        manager = CPUOffloadingManager(size, policy)
        loaded, stored = array("I"), array("I")
        for keys, on_gpu in zip(self._requests(), self.gpu_hits, strict=True):
            num_loaded, num_stored = _serve(manager, keys, on_gpu)
            loaded.append(num_loaded)
            stored.append(num_stored)
        return HostTraffic(loaded, stored)

    def _requests(self) -> Iterator[list[OffloadKey]]:
        """Yield the keys of one request at a time, because all keys together would be large."""
        starts, keys = self.references.starts, self._keys
        if not keys:
            keys += (make_offload_key(n.to_bytes(32, "big"), 0) for n in range(starts[-1]))
        for request in self.references.requests:
            found: list[OffloadKey] = []
            for run in request.runs:
                found += keys[starts[run] : starts[run + 1]]
            yield found


def _serve(manager: CPUOffloadingManager, keys: list[OffloadKey], on_gpu: int) -> tuple[int, int]:
    """Serve one request from its arrival to its end; return the blocks loaded and stored."""
    ctx, lookup, hit = ReqContext(), manager.lookup, LookupResult.HIT
    end = on_gpu
    while end < len(keys) and lookup(keys[end], ctx) is hit:
        end += 1
    loaded = keys[on_gpu:end]
    if loaded:
        manager.prepare_load(loaded, ctx)
    offered = keys[:on_gpu] + keys[end:]
    stored: list[OffloadKey] = []
    for at in range(0, len(offered), STEP_BLOCKS):
        output = manager.prepare_store(offered[at : at + STEP_BLOCKS], ctx)
        if output is None:  # this request fills the whole tier
            break
        stored += output.keys_to_store
    manager.touch(keys, ctx)
    if loaded:
        manager.complete_load(loaded, ctx)
    if stored:
        manager.complete_store(stored, ctx)
    return len(loaded), len(stored)
