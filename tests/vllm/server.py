"""The simulated server of ``kvview check --engine vllm``, with the configuration of a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from typing_extensions import override

from kvview import CacheGeometry, CacheGroup, FullAttention
from kvview.testing.connector import Add, Scenario
from kvview_vllm.releases.compat.calls import can_name_groups
from kvview_vllm.simulation.kvview.kvview_engine import Configs, KVViewHarness
from kvview_vllm.simulation.scheduler import cpu_scheduler
from kvview_vllm.simulation.scheduler.cpu_scheduler import connector_config

BLOCK_SIZE = 16
NUM_BLOCKS = 64
NUM_TOKENS = 6 * BLOCK_SIZE + 4
HIT_TOKENS = 6 * BLOCK_SIZE
EXAMPLE = f"{Path(__file__).parents[2] / 'examples' / 'host_cache.py'}:HostCacheConnector"
FAULTY = str(Path(__file__).with_name("faulty_connectors.py"))


class Server(KVViewHarness):
    """A real scheduler with its pool, and one worker's side; each byte is compared.

    Args:
        transfer_config: Arguments of ``KVTransferConfig``; by default those of the example.
        groups: The KV-cache groups.
        num_blocks: Blocks of the pool.
    """

    def __init__(
        self,
        transfer_config: dict[str, Any] | None = None,
        groups: Sequence[CacheGroup] = (FullAttention(BLOCK_SIZE),),
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self._transfer_config = transfer_config or connector_config(EXAMPLE, cpu_blocks=64)
        self.hits: dict[str, int] = {}
        """Tokens of each request that were not computed at its first start."""
        self._serials = count()
        geometry = CacheGeometry(BLOCK_SIZE, BLOCK_SIZE, tuple(groups))
        scenario = Scenario(
            geometry, num_blocks, (), max_tokens_per_step=cpu_scheduler.MAX_TOKENS, decode_tokens=1
        )
        super().__init__(scenario, ())
        self._plays_handoffs = "handoffs" in self._transfer_config["kv_connector_extra_config"]

    @override
    def _make_configs(self, scenario: Scenario, *_: object) -> Configs:  # type: ignore[override]
        self.configs = Configs(
            scenario.geometry.groups,
            self._transfer_config,
            publishes_events=can_name_groups(),
            **cpu_scheduler.sizes_of(scenario),
        )
        return self.configs

    @property
    def connector(self) -> Any:
        """The scheduler's side, which the scheduler owns."""
        return self.scheduler.real.connector

    @property
    def half(self) -> Any:
        """The scheduler half of the only connector."""
        return self.connector._scheduler_side.half

    @property
    def worker(self) -> Any:
        """The worker's side."""
        return self._workers[0]

    def num_free_blocks(self) -> int:
        """Return the number of free blocks of the real pool."""
        return int(self.scheduler.pool.get_num_free_blocks())

    def ask(self, name: str, num_output_tokens: int = 4, *, family: int = 1) -> Any:
        """Queue a request with a prompt of six blocks and a part of one; return the request."""
        self.add(Add(name, family, NUM_TOKENS, num_output_tokens), next(self._serials))
        return self.scheduler.planned[name].request

    def run(self) -> None:
        """Step until every request has ended and the connector is idle."""
        for _ in range(400):
            if not self.has_work():
                break
            self.step()
        assert not self.has_work(), "requests or transfers are left after 400 steps"
        self.step()  # the last acknowledgement
        assert not self.stats.mismatches, self.mismatch

    def evict(self) -> None:
        """Empty the prefix cache and overwrite the KV cache, so that only loads bring it back."""
        self.squeeze(NUM_BLOCKS)
        self.squeeze(0)

    @override
    def _launch_step(self, output: Any, chunks: Mapping[str, Any]) -> Any:
        for name, chunk in chunks.items():
            self.hits.setdefault(name, chunk.start)
        return super()._launch_step(output, chunks)
